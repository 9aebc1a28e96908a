"""Readers of a split: each with its own place, all with the same order."""

from __future__ import annotations

from typing import Any, Protocol

from agilerl.data.order import Cursor, rank_share
from agilerl.errors import DataError
from agilerl.llm_envs.splits import Split
from agilerl.typing import Batch

__all__ = ["Feed", "Reader"]


class Reader(Protocol):
    """What a training loop reads from: :class:`Feed`, or a stream's reader."""

    @property
    def epoch(self) -> int:
        """Full passes made."""
        ...

    @property
    def position(self) -> int:
        """Global rows read in the present pass."""
        ...

    @property
    def num_rows(self) -> int | None:
        """Global rows of a pass; None where nobody knows."""
        ...

    def take(self, rows: int) -> Batch:
        """This rank's share of the next ``rows`` global rows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a place."""
        ...

    def copy(self) -> Reader:
        """A reader of its own at the same place."""
        ...

    def rewind(self) -> None:
        """Go back to the start."""
        ...


class Feed:
    """An independent reader of a prepared split.

    Args:
        split: The rows.
        seed: With the epoch, decides the order.
        rank: This rank's index.
        world_size: Number of ranks that share each global batch.
        is_shuffled: False reads rows in their own order (test splits).
    """

    def __init__(
        self, split: Split, *, seed: int, rank: int = 0, world_size: int = 1, is_shuffled: bool = True
    ) -> None:
        self._split, self._rank, self._world_size = split, rank, world_size
        self._cursor = Cursor(len(split), seed, is_shuffled)

    @property
    def epoch(self) -> int:
        """Full passes made."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Global rows read in the present pass."""
        return self._cursor.position

    @property
    def num_rows(self) -> int:
        """Global rows of a pass."""
        return self._cursor.num_rows

    def take(self, rows: int) -> Batch:
        """This rank's share of the next ``rows`` global rows.

        Never crosses an epoch's end: the remainder of an epoch is a smaller batch. A rank without a share of it gets zero
        rows, [0, 0].

        Raises:
            DataError: ``rows`` is not positive.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise DataError(f"take was asked for {rows!r} rows; it must be a positive whole number.")
        return self._split.batch(rank_share(self._cursor.take(rows), self._rank, self._world_size))

    def rewind(self) -> None:
        """Go back to the start of epoch 0."""
        self._cursor.epoch = self._cursor.position = 0

    def copy(self) -> Feed:
        """A feed of its own at the same place."""
        feed = Feed(
            self._split,
            seed=self._cursor.seed,
            rank=self._rank,
            world_size=self._world_size,
            is_shuffled=self._cursor.is_shuffled,
        )
        feed._cursor.epoch, feed._cursor.position = self._cursor.epoch, self._cursor.position
        return feed

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain data; valid for any number of ranks."""
        return {
            "fingerprint": self._split.fingerprint,
            "seed": self._cursor.seed,
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a place.

        Raises:
            DataError: It belongs to other data, another order, or does not exist.
        """
        if state.get("fingerprint") != self._split.fingerprint:
            raise DataError(
                "The saved place belongs to other training data (rows, tokenizer, template or length settings differ); "
                "resume with the same data, or start afresh."
            )
        if state.get("seed") != self._cursor.seed:
            raise DataError(
                f"The saved place belongs to data seed {state.get('seed')!r}, but this one has {self._cursor.seed!r}; "
                "use the same."
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < max(1, self._cursor.num_rows):
            raise DataError(
                f"The saved place (epoch {epoch}, row {position}) does not exist in {self._cursor.num_rows} rows."
            )
        self._cursor.epoch, self._cursor.position = epoch, position
