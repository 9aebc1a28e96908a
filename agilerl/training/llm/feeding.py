"""Rows for each agent: one reader per member of a population, each with a place of its own in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from agilerl.errors import CheckpointError, ConfigError, DataError
from agilerl.typing import Batch

__all__ = ["Reader", "ResetStream", "num_rows", "open_readers", "rows_per_epoch", "settle"]


class Reader(Protocol):
    """One agent's place in the training rows."""

    @property
    def epoch(self) -> int:
        """Full passes behind this place."""
        ...

    def take(self, rows: int) -> Batch:
        """Return this rank's share of the next ``rows`` global rows; fewer where an epoch ends."""
        ...

    def fork(self) -> Reader:
        """Return another reader at the same place, for a clone."""
        ...

    def close(self) -> None:
        """Say that no more rows will be taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place."""
        ...


def open_readers(env: Any, count: int, dp_size: int) -> list[Reader]:
    """Return a reader per agent. A single agent moves the env's own cursor; several read independently of it."""
    if hasattr(env, "feed") and hasattr(env, "reader"):
        return [_FeedReader(env.reader)] if count == 1 else [_FeedReader(env.feed()) for _ in range(count)]
    stream = ResetStream(env, dp_size)
    return [stream.reader() for _ in range(count)]


def rows_per_epoch(env: Any, runtime: Any) -> int | None:
    """Return the global number of training rows; None where the data set has no known length."""
    if hasattr(env, "reader"):
        return env.reader.num_rows
    sizes = getattr(env, "dataset_size", None)
    share = sizes.get("train") if isinstance(sizes, Mapping) else None
    if share is None and not isinstance(sizes, Mapping):
        try:
            share = len(env)
        except TypeError:
            return None
    if not isinstance(share, int):
        return None
    return int(runtime.sum([share])[0])


def settle(env: Any, reader: Reader) -> None:
    """Bring the env's own cursor to where ``reader`` stands, so that a later run goes on from there."""
    if hasattr(env, "load_state_dict"):
        env.load_state_dict(reader.state_dict())


def num_rows(batch: Batch) -> int:
    """Return the rows of a batch of either kind."""
    ids = batch.get("input_ids", batch.get("chosen_input_ids"))
    if not isinstance(ids, Tensor):
        raise DataError(f"A batch needs input_ids (or chosen_input_ids); found the keys {', '.join(batch)}.")
    return int(ids.shape[0])


class _FeedReader:
    """A cursor on the env's training rows."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    @property
    def epoch(self) -> int:
        return self._feed.epoch

    def take(self, rows: int) -> Batch:
        return self._feed.take(rows)

    def fork(self) -> Reader:
        return _FeedReader(self._feed.copy())

    def close(self) -> None:
        """Nothing to let go of: the env does not know its feeds."""

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feed.load_state_dict(dict(state))


class ResetStream:
    """Rows of an env that only knows ``reset()``, for several readers at once.

    Rows stay in memory from the slowest reader's place on. ``len(env)`` rows of this rank make an epoch.
    """

    def __init__(self, env: Any, dp_size: int) -> None:
        self._env = env
        self._dp_size = dp_size
        self._rows: list[dict[str, Any]] = []
        self._first = 0
        self._readers: list[_StreamReader] = []
        try:
            self.epoch_rows: int | None = len(env)
        except TypeError:
            self.epoch_rows = None

    def reader(self, offset: int = 0) -> _StreamReader:
        """Return a new reader at ``offset`` rows of this rank."""
        reader = _StreamReader(self, offset)
        self._readers.append(reader)
        return reader

    def release(self, reader: _StreamReader) -> None:
        """Forget a reader, so that rows are not kept for it."""
        self._readers.remove(reader)

    def share(self, rows: int) -> int:
        """Return this rank's part of ``rows`` global rows."""
        return -(-rows // self._dp_size)

    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return rows ``begin`` to ``end``, counted from the env's first batch of this run.

        Raises:
            ConfigError: They were let go already (a reader was moved backwards).
            DataError: The env handed out a batch without rows.
        """
        if begin < self._first:
            raise ConfigError(
                "The env has only reset() and its rows cannot be read twice; use a DatasetEnv to go back."
            )
        while self._first + len(self._rows) < end:
            batch = self._env.reset()
            rows = _split(batch)
            if not rows:
                raise DataError("env.reset() returned a batch without rows.")
            self._rows.extend(rows)
        return self._rows[begin - self._first : end - self._first]

    def trim(self) -> None:
        """Let go of rows that every reader has passed."""
        passed = min(reader.offset for reader in self._readers) - self._first
        if passed > 0:
            del self._rows[:passed]
            self._first += passed


class _StreamReader:
    """One place in a ``ResetStream``."""

    def __init__(self, stream: ResetStream, offset: int) -> None:
        self._stream = stream
        self.offset = offset

    @property
    def epoch(self) -> int:
        size = self._stream.epoch_rows
        return 0 if size is None else self.offset // size

    def take(self, rows: int) -> Batch:
        wanted = self._stream.share(rows)
        if self._stream.epoch_rows is not None:
            wanted = min(wanted, self._stream.epoch_rows - self.offset % self._stream.epoch_rows)
        taken = self._stream.read(self.offset, self.offset + wanted)
        self.offset += wanted
        self._stream.trim()
        return _join(taken)

    def fork(self) -> Reader:
        return self._stream.reader(self.offset)

    def close(self) -> None:
        self._stream.release(self)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "reset", "offset": self.offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "reset":
            raise CheckpointError("The checkpoint was made with another kind of env; resume with the same one.")
        self.offset = int(state["offset"])


def _split(batch: Batch) -> list[dict[str, Any]]:
    fields: dict[str, Any] = dict(batch)
    return [{key: value[row] for key, value in fields.items()} for row in range(num_rows(batch))]


def _join(rows: Sequence[dict[str, Any]]) -> Batch:
    """Put rows of several batches together; the shorter ones are padded on the right with mask 0."""
    joined: dict[str, Any] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if isinstance(first, Tensor) and first.dim() == 1:
            joined[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        elif isinstance(first, Tensor):
            joined[key] = torch.stack(values)
        else:
            joined[key] = values
    return joined  # type: ignore[return-value]
