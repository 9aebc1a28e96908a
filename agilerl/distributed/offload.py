"""Activations kept in host memory between forward and backward."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager

import torch

__all__ = ["activation_offload"]

_log = logging.getLogger(__name__)
_told: set[str] = set()


def activation_offload(enabled: bool, device: torch.device | str) -> AbstractContextManager[object]:
    """Context for a training forward: tensors saved for backward go to pinned host memory.

    On a CPU they are there already; that is told once and nothing changes.

    Args:
        enabled: ``False`` gives a context that does nothing.
        device: Where the model computes.
    """
    if not enabled:
        return contextlib.nullcontext()
    if torch.device(device).type == "cpu":
        if "cpu" not in _told:
            _told.add("cpu")
            _log.warning("activation_offload: the model computes on the CPU, where there is nothing to gain.")
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.device(device).type == "cuda")
