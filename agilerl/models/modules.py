"""What every module carries: its mode and its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["has_hooks", "in_mode", "probing"]


def has_hooks(module: nn.Module) -> bool:
    """Whether something hangs on the calls of this very module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode; every module's own comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode comes back afterwards."""
    with in_mode(model, training=False), torch.no_grad():
        yield
