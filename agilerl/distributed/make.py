"""Which runtime an agent gets."""

from __future__ import annotations

import torch

from agilerl.distributed.config import FSDPConfig
from agilerl.distributed.dense import DenseRuntime
from agilerl.distributed.runtime import Runtime
from agilerl.errors import ConfigError

__all__ = ["make_runtime"]


def make_runtime(device: torch.device | str, fsdp_config: FSDPConfig | None = None) -> Runtime:
    """The runtime for ``device``; starts the process group under a launcher such as ``torchrun``.

    Args:
        device: ``"cpu"`` or ``"cuda"``; with several ranks ``"cuda"`` means each rank's own GPU.
        fsdp_config: ``None`` keeps a whole model on every rank; otherwise the model is sharded.
    """
    if fsdp_config is None:
        return DenseRuntime(device)
    if not isinstance(fsdp_config, FSDPConfig):
        raise ConfigError(f"fsdp_config must be an FSDPConfig or None, not {type(fsdp_config).__name__}.")
    from agilerl.distributed.fsdp import FSDPRuntime

    return FSDPRuntime(device, fsdp_config)
