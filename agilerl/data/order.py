"""Which rows come when, and whose they are: pure functions of (seed, epoch) and a cursor that resume needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cursor", "epoch_order", "mix", "rank_share", "share_sizes"]


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a fixed, well-mixed permutation of 64-bit integers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_order(num_rows: int, seed: int, epoch: int, block: int = 0) -> NDArray[np.int64]:
    """Row order of one epoch, [num_rows].

    Rows are sorted by a hash of (seed, epoch, block, row) rather than shuffled by a library's generator, so the order does
    not change with the library's version, and a run can be resumed years later.
    """
    start = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (epoch, block):
            start = mix(start ^ mix(np.array([part], dtype=np.uint64)))
        keys = mix(mix(np.arange(num_rows, dtype=np.uint64)) ^ start)
    return np.argsort(keys, kind="stable")


def share_sizes(num_rows: int, world_size: int) -> list[int]:
    """How many of ``num_rows`` rows each rank gets: as even as can be, lower ranks first."""
    each, left = divmod(num_rows, world_size)
    return [each + (rank < left) for rank in range(world_size)]


def rank_share(rows: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """The part of a global batch that belongs to ``rank``; disjoint over ranks, complete, possibly empty."""
    sizes = share_sizes(len(rows), world_size)
    start = sum(sizes[:rank])
    return rows[start : start + sizes[rank]]


@dataclass
class Cursor:
    """A place in the endless sequence of epochs; counts global rows, so it means the same on any number of ranks."""

    num_rows: int
    seed: int
    is_shuffled: bool = True
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def order(self) -> NDArray[np.int64]:
        """Row order of the present epoch, [num_rows]."""
        if not self.is_shuffled:
            return np.arange(self.num_rows, dtype=np.int64)
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = (self.epoch, epoch_order(self.num_rows, self.seed, self.epoch))
        return self._cached[1]

    def take(self, rows: int) -> NDArray[np.int64]:
        """The next global rows, at most ``rows`` and never across an epoch's end; moves on."""
        taken = self.order()[self.position : self.position + rows]
        self.position += len(taken)
        if self.position >= self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
        return taken
