"""Many processes: process group, collectives, replicated and sharded runtimes.

Names are looked up on first use, so that importing :class:`FSDPConfig` (plain settings) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agilerl.distributed.checkpointing import set_gradient_checkpointing
    from agilerl.distributed.config import FSDPConfig
    from agilerl.distributed.dense import DenseRuntime
    from agilerl.distributed.failure import report_failure
    from agilerl.distributed.fsdp import FSDPRuntime
    from agilerl.distributed.group import close_group, ensure_group
    from agilerl.distributed.make import make_runtime
    from agilerl.distributed.offload import activation_offload
    from agilerl.distributed.ranks import (
        get_local_rank,
        get_local_world_size,
        get_rank,
        get_world_size,
        is_distributed,
        is_main_process,
    )
    from agilerl.distributed.runtime import Runtime

_HOME = {
    "FSDPConfig": "config",
    "DenseRuntime": "dense",
    "FSDPRuntime": "fsdp",
    "Runtime": "runtime",
    "activation_offload": "offload",
    "close_group": "group",
    "ensure_group": "group",
    "get_local_rank": "ranks",
    "get_local_world_size": "ranks",
    "get_rank": "ranks",
    "get_world_size": "ranks",
    "is_distributed": "ranks",
    "is_main_process": "ranks",
    "make_runtime": "make",
    "report_failure": "failure",
    "set_gradient_checkpointing": "checkpointing",
}

__all__ = [
    "DenseRuntime",
    "FSDPConfig",
    "FSDPRuntime",
    "Runtime",
    "activation_offload",
    "close_group",
    "ensure_group",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "make_runtime",
    "report_failure",
    "set_gradient_checkpointing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
