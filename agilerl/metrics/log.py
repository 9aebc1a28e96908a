"""One stream of records, several places that they go to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

__all__ = ["RECORD_KEYS", "MetricsLog", "Record", "Sink", "plain_record", "plain_value"]

Record = dict[str, float | int | str | None]

RECORD_KEYS = (
    "kind",
    "agent",
    "iteration",
    "rows",
    "epoch",
    "loss",
    "perplexity",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "real_tokens_per_s",
    "padding_share",
    "fitness",
    "elapsed_s",
    "peak_memory_gib",
)
"""Keys that a training run writes, in column order. ``kind`` is train, eval or event; ``rows`` is the step axis."""

_logger = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """A place that records go to.

    A sink that writes a file may also have ``resume(records, rows)``: called before the first write of a continued run,
    with the number of records and rows that the checkpoint knows of. What was written after those is cut off.
    """

    def write(self, record: Record) -> None:
        """Take one record; it is not changed afterwards."""
        ...

    def close(self) -> None:
        """Flush and release what is held; called once."""
        ...


def plain_value(value: object) -> float | int | str | None:
    """A number, text or ``None`` that every file format can hold; tensors and NumPy scalars become plain numbers."""
    if value is None or isinstance(value, (str, bool)):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    item = getattr(value, "item", None)
    return plain_value(item()) if callable(item) else str(value)


def plain_record(record: Mapping[str, object]) -> Record:
    """``record`` with plain values; the order of its keys is kept."""
    return {key: plain_value(value) for key, value in record.items()}


class MetricsLog:
    """Sends each record to every sink and keeps a history.

    A sink that raises is named in one warning and left out from then on: logging never ends a training run.

    Args:
        sinks: Where records go.
        history: Kinds of records kept in :attr:`history` (and in checkpoints); ``()`` keeps none.
    """

    def __init__(self, sinks: Iterable[Sink] = (), history: Iterable[str] = ("eval",)) -> None:
        self.sinks: list[Sink] = list(sinks)
        self.history: list[Record] = []
        self.records = 0
        """Records logged so far, those before a resume included."""
        self._rows = 0
        self._kinds = frozenset(history)

    def log(self, record: Mapping[str, object]) -> None:
        """Send one record to all sinks."""
        plain = plain_record(record)
        rows = plain.get("rows")
        self._rows = max(self._rows, rows) if isinstance(rows, int) else self._rows
        self.records += 1
        if plain.get("kind") in self._kinds:
            self.history.append(plain)
        for sink in tuple(self.sinks):
            self._call(sink, "write", dict(plain))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the history, and how much had been logged."""
        return {"history": [dict(record) for record in self.history], "records": self.records, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: sinks cut off what an interrupted run wrote after it, so no record comes twice."""
        self.history = [dict(record) for record in state["history"]]
        self.records, self._rows = int(state["records"]), int(state["rows"])
        for sink in tuple(self.sinks):
            if hasattr(sink, "resume"):
                self._call(sink, "resume", self.records, self._rows)

    def close(self) -> None:
        """Close all sinks; safe to call twice."""
        sinks, self.sinks = tuple(self.sinks), []
        for sink in sinks:
            self._call(sink, "close")

    def _call(self, sink: Sink, method: str, *args: object) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception as error:
            # Any error of a tracker (network, disk, a bug of its own) may arrive here; none is worth a lost run.
            if sink in self.sinks:
                self.sinks.remove(sink)
            _logger.debug("%s.%s failed", type(sink).__name__, method, exc_info=True)
            message = f"{type(sink).__name__} failed and is switched off ({error}); training goes on."
            warnings.warn(message, RuntimeWarning, stacklevel=3)
