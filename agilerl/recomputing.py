"""What a block's forward pass and its repetition in backward must share, or may.

A repetition must draw the same random numbers, and may take over what the first pass put aside for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from agilerl import lanes

__all__ = ["Results", "contexts", "results"]

Results = deque[tuple[Tensor, ...]]
"""What was put aside, in the order of computation."""

_local = threading.local()  # .block: what `results` returns


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass and of its repetition, as PyTorch's checkpoints take them."""
    kept = Results()
    return _computing(kept, is_again=False), _Repeatable(lanes.replay(), partial(_computing, kept, is_again=True))


def results() -> tuple[Results | None, bool]:
    """What this thread's block has put aside (None where it will not be repeated), and whether it is being repeated."""
    return getattr(_local, "block", (None, False))


@contextmanager
def _computing(kept: Results, *, is_again: bool) -> Iterator[None]:
    _local.block = (kept, is_again)
    try:
        yield
    finally:
        del _local.block


class _Repeatable(AbstractContextManager[None]):
    """Contexts made anew each time: a second backward pass through a block recomputes it a second time."""

    def __init__(self, *make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._open = ExitStack()
        for make in self._make:
            self._open.enter_context(make())

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
