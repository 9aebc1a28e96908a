"""Streams: rows that are read, tokenised and shuffled window by window, because nobody knows how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agilerl.data.order import epoch_order, rank_share
from agilerl.data.records import Example, Row, RowFault
from agilerl.errors import DataError
from agilerl.llm_envs.splits import StoredSplit
from agilerl.typing import Batch

__all__ = ["StreamFeed", "Windows", "is_stream"]

Numbered = Iterator[tuple[int, Row | RowFault]]


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is a ``datasets.IterableDataset``; looks without importing the library."""
    return any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)


class Windows:
    """Windows of a stream, tokenised when first asked for; the last few are kept for readers that share them.

    Args:
        open_rows: The rows of an epoch from the start, numbered.
        prepare: Rows to a split (perhaps of no rows).
        size: Rows of a window; they are shuffled together.
        identity: Names the data and settings, for saved places.
    """

    _KEPT = 3

    def __init__(
        self,
        open_rows: Callable[[int], Numbered],
        prepare: Callable[[Numbered], StoredSplit],
        size: int,
        identity: str,
    ) -> None:
        self._open, self._prepare, self.size, self.identity = open_rows, prepare, size, identity
        self._kept: dict[tuple[int, int], tuple[StoredSplit, bool]] = {}
        self._live: tuple[int, int, Numbered, list] | None = None

    def get(self, epoch: int, index: int) -> tuple[StoredSplit, bool]:
        """Window ``index`` of an epoch, and whether it is the epoch's last."""
        found = self._kept.get((epoch, index))
        if found is None:
            found = self._read(epoch, index)
            self._kept[epoch, index] = found
            while len(self._kept) > self._KEPT:
                del self._kept[next(iter(self._kept))]
        return found

    def _read(self, epoch: int, index: int) -> tuple[StoredSplit, bool]:
        if self._live is None or self._live[:2] != (epoch, index):
            rows = self._open(epoch)
            skipped = sum(1 for _ in islice(rows, index * self.size))
            if skipped < index * self.size:
                raise DataError(
                    f"The stream ended after {skipped} rows, before the saved place; it is not the same stream."
                )
            ahead: list = list(islice(rows, 1))
        else:
            _, _, rows, ahead = self._live
        window = [*ahead, *islice(rows, self.size - len(ahead))]
        ahead = list(islice(rows, 1))
        self._live = (epoch, index + 1, rows, ahead)
        return self._prepare(iter(window)), not ahead


class StreamFeed:
    """An independent reader of a stream; has the interface of :class:`~agilerl.llm_envs.feed.Feed`.

    Args:
        windows: The stream.
        seed: With epoch and window, decides the order inside a window.
        rank: This rank's index.
        world_size: Number of ranks that share each global batch; each reads the whole stream and keeps its share.
    """

    def __init__(self, windows: Windows, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self._windows, self._seed, self._rank, self._world_size = windows, seed, rank, world_size
        self._epoch = self._position = self._window = self._offset = 0

    @property
    def epoch(self) -> int:
        """Full passes made."""
        return self._epoch

    @property
    def position(self) -> int:
        """Global rows read in the present pass."""
        return self._position

    @property
    def num_rows(self) -> int | None:
        """None: nobody knows how many rows a pass has."""
        return None

    def take(self, rows: int) -> Batch:
        """This rank's share of the next ``rows`` global rows; never crosses an epoch's end.

        Raises:
            DataError: ``rows`` is not positive, or a whole pass holds no row that can be used.
        """
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise DataError(f"take was asked for {rows!r} rows; it must be a positive whole number.")
        parts: list[tuple[StoredSplit, NDArray[np.int64]]] = []
        missing, epoch = rows, self._epoch
        split, _ = self._windows.get(self._epoch, self._window)
        while missing and self._epoch == epoch:
            split, is_last = self._windows.get(self._epoch, self._window)
            order = epoch_order(len(split), self._seed, self._epoch, self._window)
            taken = order[self._offset : self._offset + missing]
            missing -= len(taken)
            self._offset += len(taken)
            self._position += len(taken)
            if len(taken):
                parts.append((split, taken))
            if self._offset >= len(split):
                self._next_window(is_last, has_rows=missing < rows or self._position > 0)
        return self._share(split, parts)

    def _next_window(self, is_last: bool, *, has_rows: bool) -> None:
        self._offset = 0
        if not is_last:
            self._window += 1
            return
        if not has_rows:
            raise DataError("The stream has no row that can be trained on.")
        self._epoch, self._window, self._position = self._epoch + 1, 0, 0

    def _share(self, split: StoredSplit, parts: list[tuple[StoredSplit, NDArray[np.int64]]]) -> Batch:
        places = np.concatenate([np.full(len(taken), part) for part, (_, taken) in enumerate(parts)] or [np.empty(0)])
        numbers = np.concatenate([taken for _, taken in parts] or [np.empty(0, np.int64)])
        mine = rank_share(np.arange(len(numbers), dtype=np.int64), self._rank, self._world_size)
        examples: list[tuple[Example, ...]] = []
        for place in mine.tolist():
            examples += parts[int(places[place])][0].examples([int(numbers[place])])
        return split.collate(examples, with_weights=any(part.with_weights for part, _ in parts))

    def rewind(self) -> None:
        """Go back to the start of epoch 0."""
        self._epoch = self._position = self._window = self._offset = 0

    def copy(self) -> StreamFeed:
        """A feed of its own at the same place, sharing the windows."""
        feed = StreamFeed(self._windows, seed=self._seed, rank=self._rank, world_size=self._world_size)
        feed._epoch, feed._position = self._epoch, self._position
        feed._window, feed._offset = self._window, self._offset
        return feed

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain data; valid for any number of ranks."""
        return {
            "fingerprint": self._windows.identity,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "window": self._window,
            "offset": self._offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a place: rows before it are read again and passed over.

        Raises:
            DataError: It belongs to another stream, other settings or another seed.
        """
        if state.get("fingerprint") != self._windows.identity:
            raise DataError(
                "The saved place belongs to another stream, tokenizer, template or length setting; use the same."
            )
        if state.get("seed") != self._seed:
            raise DataError(
                f"The saved place belongs to data seed {state.get('seed')!r}, not {self._seed!r}; use the same."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._window, self._offset = int(state["window"]), int(state["offset"])
