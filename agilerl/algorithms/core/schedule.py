"""Which rows make up each micro-batch, and which micro-batches are computed side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agilerl import lanes
from agilerl.losses import keeping_tile

__all__ = ["Schedule"]

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of an optimizer step or of an evaluation.

    Attributes:
        micros: Row indices of each.
        lanes: By lane, the numbers of those that it computes, in order. One lane has all threads of the processor.
    """

    micros: list[list[int]]
    lanes: list[list[int]]

    @classmethod
    def in_turn(cls, micros: list[list[int]]) -> Schedule:
        """One micro-batch after the other."""
        return cls(micros, [list(range(len(micros)))])

    def each(self, compute: Callable[[Sequence[int]], T]) -> list[T]:
        """``compute(row indices)`` of every micro-batch, in their order, whichever lane computes it."""
        found = self.by_lane(lambda numbers: {number: compute(self.micros[number]) for number in numbers})
        results = {number: each for lane in found for number, each in lane.items()}
        return [results[number] for number in range(len(self.micros))]

    def by_lane(self, compute: Callable[[Sequence[int]], T], *, seed: int = 0) -> list[T]:
        """``compute(numbers of its micro-batches)`` of every lane, at once where there are several.

        Args:
            compute: Must not write to anything that lanes share.
            seed: Of what is drawn in lanes; a single one draws from the global generator.
        """

        def one(numbers: Sequence[int]) -> T:
            with keeping_tile():
                return compute(numbers)

        if len(self.lanes) == 1:
            return [one(self.lanes[0])]
        return lanes.run([partial(one, numbers) for numbers in self.lanes], seed=seed)
