"""Micro-batches side by side on a processor.

An operation that is spread over all threads leaves some of them waiting: small ones do not divide, heads do not always
come out even, and Python runs in between. Two threads that compute a micro-batch of half the size each, with half of the
processor's threads, wait for nothing but each other's end.

The order in which they get ahead must not show in the result: what is drawn in a lane comes from the lane's own generator,
what it knows of its micro-batch is its own, and what lanes add up is joined in a fixed order by the caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["NUM_LANES", "Lane", "current", "generator", "pay_off", "replay", "run"]

NUM_LANES = 2
"""Micro-batches at a time, where there is more than one."""
# In narrower models Python takes most of the time, and Python is what lanes cannot do at once.
_LEAST_WIDTH = 256

T = TypeVar("T")


@dataclass
class Lane:
    """What one lane must not share with another.

    Attributes:
        generator: The source of everything random in it.
        segments: Boundaries of the samples that it computes, by the identity of a configuration.
    """

    generator: torch.Generator
    segments: dict[int, Any] = field(default_factory=dict)


_local = threading.local()


def pay_off(width: int) -> bool:
    """Whether lanes shorten a step of a model of that hidden size on this processor."""
    return width >= _LEAST_WIDTH and torch.get_num_threads() >= NUM_LANES


def current() -> Lane | None:
    """The lane of this thread; None outside of lanes."""
    return getattr(_local, "lane", None)


def generator() -> torch.Generator | None:
    """What to draw from: the lane's generator, or None for the global one."""
    lane = current()
    return None if lane is None else lane.generator


def run(tasks: Sequence[Callable[[], T]], *, seed: int = 0) -> list[T]:
    """Run each task in a lane, all at once, with an equal share of the processor's threads.

    Args:
        tasks: They must not write to anything that they share.
        seed: Of the lanes' generators.

    Returns:
        The results, in the order of the tasks.

    Raises:
        Exception: Of the first task that failed, once all have ended.
    """
    threads = torch.get_num_threads()
    share = max(1, threads // len(tasks))
    grad = torch.is_grad_enabled()
    workers = _workers(len(tasks))
    futures = [
        workers.submit(copy_context().run, _in_lane, task, seed + number, share, grad)
        for number, task in enumerate(tasks)
    ]
    try:
        wait(futures)
    except BaseException:  # an interrupt: nothing may still be computing when the caller goes on
        wait(futures)
        raise
    finally:
        torch.set_num_threads(threads)  # threads that PyTorch has not seen yet start with what was set last, by any
    return [future.result() for future in futures]


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="lane")


os.register_at_fork(after_in_child=_workers.cache_clear)  # a forked process has none of its parent's threads


def _in_lane(task: Callable[[], T], seed: int, threads: int, grad: bool) -> T:
    if torch.get_num_threads() != threads:  # of this thread alone
        torch.set_num_threads(threads)
    _local.lane = Lane(torch.Generator().manual_seed(seed))
    try:
        with torch.set_grad_enabled(grad):
            return task()
    finally:
        _local.lane = None


def replay() -> Callable[[], AbstractContextManager[None]]:
    """What makes contexts in which this lane draws again what it draws from now on.

    PyTorch's checkpoints do so for the global generator.
    """
    lane = current()
    return nullcontext if lane is None else partial(_replaying, lane.generator, lane.generator.get_state())


@contextmanager
def _replaying(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
