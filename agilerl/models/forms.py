"""When the faster forms of a model's parts compute, and when its own code does.

They do where gradients are wanted and inside of micro-batches, so that training and evaluation round alike. A plain
forward without gradients is left to the model's own code and gives what the same model gives anywhere, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["are_fast", "fast_forms", "in_micro_batch"]

_depth = 0
_lock = threading.Lock()  # lanes come and go at once


@contextmanager
def fast_forms() -> Iterator[None]:
    """Let the faster forms compute, whether gradients are wanted or not."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    global _depth
    with _lock:
        _depth += step


def are_fast() -> bool:
    """Whether the faster forms are to compute."""
    return _depth > 0 or torch.is_grad_enabled()


def in_micro_batch() -> bool:
    """Whether a micro-batch of this package is being computed: narrower than `are_fast`, for what models share."""
    return _depth > 0
