"""When the faster forms of a model's parts compute, and when its own code does.

They do where gradients are wanted and inside of micro-batches, so that training and evaluation round alike. A plain
forward without gradients is left to the model's own code and gives what the same model gives anywhere, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["are_fast", "fast_forms", "in_micro_batch"]

_depth = 0


@contextmanager
def fast_forms() -> Iterator[None]:
    """Let the faster forms compute, whether gradients are wanted or not."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def are_fast() -> bool:
    """Whether the faster forms are to compute."""
    return _depth > 0 or torch.is_grad_enabled()


def in_micro_batch() -> bool:
    """Whether a micro-batch of this package is being computed: narrower than `are_fast`, for what models share."""
    return _depth > 0
