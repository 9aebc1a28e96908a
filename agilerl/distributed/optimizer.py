"""What sharded layouts ask of a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agilerl.distributed.shards import is_sharded

__all__ = ["keep_state_on_host", "separate_kinds"]


def separate_kinds(optimizer: torch.optim.Optimizer) -> None:
    """Step parameter by parameter in groups that mix sharded and whole tensors, which one fused call refuses."""
    for group in optimizer.param_groups:
        kinds = {(is_sharded(p), getattr(p, "device_mesh", None)) for p in group["params"]}
        if len(kinds) > 1 and "foreach" in group:
            group["foreach"] = False


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Hold moments in host memory between steps: they travel to the weights for the step and back after it."""

    def fetch(_optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _move(optimizer, to_host=False)

    def release(_optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _move(optimizer, to_host=True)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(release)


def _move(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    for parameter, entries in optimizer.state.items():
        target = torch.device("cpu") if to_host else parameter.device
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                entries[key] = value.to(target)
