"""A split in numbers: what a person should know before the first step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agilerl.data.encoder import TextEncoder
from agilerl.data.order import mix
from agilerl.data.report import Fault, Report
from agilerl.data.store import Store

__all__ = ["Summary", "content_hashes", "last_trained_ids", "summarise"]

_PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass(frozen=True)
class Summary:
    """Counts of one split."""

    report: Report
    rows: int
    tokens: int
    trained_tokens: int
    percentiles: dict[int, int]
    """Length in tokens, by percentile."""
    histogram: list[tuple[int, int, int]]
    """(from, to, rows) of lengths in tokens."""
    shortest: tuple[int, int]
    """(record, tokens)"""
    longest: tuple[int, int]
    with_bos: int
    """Rows that open with BOS."""
    with_double_bos: int
    with_eos: int
    """Rows whose last trained token is EOS."""
    stop_tokens: dict[str, int]
    """Rows by their last trained token, control tokens only."""
    unfinished: int
    """Rows whose last trained token is no control token: the answer was cut, or nothing ends it."""
    without_prompt: int
    """Rows that are trained from their first token on, BOS aside."""
    duplicates: list[Fault] = field(default_factory=list)
    """Rows equal to an earlier one, at most a hundred."""
    num_duplicates: int = 0

    def steps(self, batch_size: int, epochs: int = 1) -> int:
        """Optimizer steps to come."""
        return math.ceil(self.rows / batch_size) * epochs

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        report = self.report.as_dict()
        for key in ("tokens", "trained_tokens", "examples"):
            report.pop(key)
        return report | {
            "examples": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "length_percentiles": {str(key): value for key, value in self.percentiles.items()},
            "length_histogram": [list(part) for part in self.histogram],
            "shortest": {"row": self.shortest[0], "tokens": self.shortest[1]},
            "longest": {"row": self.longest[0], "tokens": self.longest[1]},
            "bos": self.with_bos,
            "double_bos": self.with_double_bos,
            "eos": self.with_eos,
            "stop_tokens": self.stop_tokens,
            "unfinished": self.unfinished,
            "duplicates": self.num_duplicates,
            "findings": [finding._asdict() for finding in [*self.report.findings, *self.duplicates]],
        }


def summarise(stores: Sequence[Store], rows: NDArray[np.int64], report: Report, encoder: TextEncoder) -> Summary:
    """The numbers of a split: ``rows`` of ``stores``."""
    lengths = np.max([store.lengths[rows] for store in stores], axis=0) if len(rows) else np.zeros(0, np.int32)
    sources = stores[0].source_rows[rows]
    last = np.concatenate([last_trained_ids(store)[rows] for store in stores])
    names = {index: text for text, index in encoder.control_ids.items()}
    ends = Counter(last.tolist())
    stops = {names[index]: count for index, count in ends.most_common() if index in names}
    first, second = _token_at(stores[0], rows, 0), _token_at(stores[0], rows, 1)
    bos = -2 if encoder.bos_id is None else encoder.bos_id
    duplicates, count = _duplicates(content_hashes(stores)[rows], sources)
    short, long = (int(np.argmin(lengths)), int(np.argmax(lengths))) if len(lengths) else (0, 0)
    return Summary(
        report=report,
        rows=len(rows),
        tokens=sum(int(store.lengths[rows].sum()) for store in stores),
        trained_tokens=sum(int(store.targets_per_row[rows].sum()) for store in stores),
        percentiles={p: int(np.percentile(lengths, p)) for p in _PERCENTILES} if len(lengths) else {},
        histogram=_histogram(lengths),
        shortest=(int(sources[short]), int(lengths[short])) if len(lengths) else (0, 0),
        longest=(int(sources[long]), int(lengths[long])) if len(lengths) else (0, 0),
        with_bos=int((first == bos).sum()),
        with_double_bos=int(((first == bos) & (second == bos)).sum()),
        with_eos=ends.get(-1 if encoder.eos_id is None else encoder.eos_id, 0),
        stop_tokens=stops,
        unfinished=len(last) - sum(stops.values()),
        without_prompt=int((stores[0].prompt_lengths[rows] <= (first == bos)).sum()),
        duplicates=duplicates,
        num_duplicates=count,
    )


def content_hashes(stores: Sequence[Store]) -> NDArray[np.uint64]:
    """Hash of each row over all stores, [rows]."""
    hashes = np.asarray(stores[0].columns["content_hash"])
    for store in stores[1:]:
        with np.errstate(over="ignore"):
            hashes = mix(hashes) ^ store.columns["content_hash"]
    return hashes


def last_trained_ids(store: Store) -> NDArray[np.int64]:
    """Id of the last trained token of each row, -1 where there is none, [rows]."""
    counts = store.columns["num_spans"].astype(np.int64)
    last_span = np.cumsum(counts) - 1
    found = np.full(len(store), -1, dtype=np.int64)
    has = counts > 0
    ends = store.columns["span_end"][last_span[has]].astype(np.int64)
    found[has] = store.columns["ids"][store.first_ids[has] + ends - 1]
    return found


def _token_at(store: Store, rows: NDArray[np.int64], position: int) -> NDArray[np.int64]:
    found = np.full(len(rows), -1, dtype=np.int64)
    has = store.lengths[rows] > position
    found[has] = store.columns["ids"][store.first_ids[rows[has]] + position]
    return found


def _histogram(lengths: NDArray, bins: int = 12) -> list[tuple[int, int, int]]:
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, math.ceil((high - low + 1) / bins))
    edges = list(range(low, high + step + 1, step))
    counts, _ = np.histogram(lengths, bins=edges)
    return [(a, b - 1, int(count)) for a, b, count in zip(edges, edges[1:], counts, strict=False) if a <= high]


def _duplicates(hashes: NDArray[np.uint64], sources: NDArray[np.int64]) -> tuple[list[Fault], int]:
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
    found = [
        Fault(int(sources[row]), "duplicate", f"is the same as row {int(sources[first[inverse[row]]])}")
        for row in again[:100]
    ]
    return found, len(again)
