"""How long a run lasts: dataset rows per agent, global over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agilerl.errors import ConfigError

__all__ = ["Budget", "Progress"]


class Progress(Protocol):
    """How far one agent has come."""

    rows: int
    """Rows trained in this run."""

    @property
    def epochs(self) -> int:
        """Passes over the data that this run has completed."""
        ...


@dataclass(frozen=True)
class Budget:
    """Rows that every agent gets, or passes over the data where their length is not known ahead (streams)."""

    rows: int | None
    epochs: int | None = None

    @classmethod
    def of(cls, *, max_steps: int | None, num_epochs: int | None, rows_per_epoch: int | None) -> Budget:
        """Turn what the user asked for into rows, where the data set has a known size.

        Raises:
            ConfigError: Neither is given.
        """
        if num_epochs is None:
            if max_steps is None:
                raise ConfigError("A budget needs max_steps or num_epochs.")
            return cls(rows=max_steps)
        return cls(rows=None if rows_per_epoch is None else num_epochs * rows_per_epoch, epochs=num_epochs)

    def room(self, progress: Progress, wanted: int) -> int:
        """Return how many of ``wanted`` rows this agent may still train."""
        if self.rows is not None:
            return max(0, min(wanted, self.rows - progress.rows))
        return wanted if progress.epochs < (self.epochs or 0) else 0

    def is_spent(self, everyone: Iterable[Progress]) -> bool:
        """Return whether no agent has anything left."""
        return all(self.room(one, wanted=1) == 0 for one in everyone)

    def num_iterations(self, batch_size: int, rows_per_epoch: int | None) -> int | None:
        """Return the ``learn`` calls that the budget makes at this batch size; None where that is not known.

        An epoch's remainder makes a smaller step of its own, so each epoch counts on its own.
        """
        if self.rows is None:
            return None
        if rows_per_epoch is None:
            return math.ceil(self.rows / batch_size)
        whole, rest = divmod(self.rows, rows_per_epoch)
        return whole * math.ceil(rows_per_epoch / batch_size) + math.ceil(rest / batch_size)
