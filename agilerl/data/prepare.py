"""Rows to a store: convert, tokenise, fit and count, in chunks, so that memory does not grow with the rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from agilerl.data.fit import LengthPolicy, fit
from agilerl.data.records import Example, Record, Row, RowFault
from agilerl.data.report import Fault, Report
from agilerl.data.store import Store, StoreWriter
from agilerl.data.tokenize import RowTokenizer
from agilerl.errors import DataError

__all__ = ["BadRows", "Prepared", "bad_rows_error", "numbered", "prepare_sft"]

logger = logging.getLogger(__name__)

BadRows = Literal["raise", "skip"]
Convert = Callable[[Row], Record]
CHUNK_ROWS = 1024


@dataclass
class Prepared:
    """A split, ready to be batched, and what happened to its rows."""

    store: Store
    report: Report


def numbered(rows: Iterable[Row]) -> Iterator[tuple[int, Row | RowFault]]:
    """Rows with their record index."""
    yield from enumerate(rows)


def prepare_sft(
    rows: Iterable[tuple[int, Row | RowFault]],
    convert: Convert,
    tokenise: RowTokenizer,
    policy: LengthPolicy,
    report: Report,
    *,
    bad_rows: BadRows = "raise",
    folder: Path | None = None,
) -> Prepared:
    """Tokenise a split once.

    Args:
        rows: Records with their index in the source; a fault stands for one that could not be read.
        convert: Turns a record into a canonical row.
        tokenise: Turns canonical rows into examples.
        policy: Length budget.
        report: Counts are added here.
        bad_rows: Whether a bad row ends the preparation or is left out and counted.
        folder: Where the store is written; None: memory.

    Raises:
        DataError: A bad row (``bad_rows="raise"``), or nothing is left.
    """
    writer = StoreWriter(folder)
    try:
        iterator = iter(rows)
        while chunk := list(islice(iterator, CHUNK_ROWS)):
            report.rows_in += len(chunk)
            records, places = _convert_chunk(chunk, convert, report)
            examples, sources = _fit_chunk(tokenise(records), places, policy, report)
            writer.add(examples, sources)
            if bad_rows == "raise" and report.faults:
                raise bad_rows_error(report)
        store = writer.finish()
    finally:
        writer.close()
    report.rows_kept = len(set(store.source_rows.tolist())) if len(store) else 0
    report.tokens = int(store.lengths.sum())
    report.trained_tokens = store.num_targets
    return Prepared(store, report)


def _convert_chunk(
    chunk: list[tuple[int, Row | RowFault]], convert: Callable[[Row], Any], report: Report
) -> tuple[list[Any], list[int]]:
    records, places = [], []
    for number, row in chunk:
        try:
            if isinstance(row, RowFault):
                raise row
            records.append(convert(row))
            places.append(number)
        except RowFault as fault:
            report.add_fault(Fault(number, fault.reason, fault.message))
    return records, places


# Reasons that are the length policy at work rather than a row at fault.
_LENGTH_REASONS = frozenset({"too_long", "prompt_too_long", "no_trained_token", "no_trained_turn"})


def _fit_chunk(
    outcomes: list[Example | RowFault], places: list[int], policy: LengthPolicy, report: Report
) -> tuple[list[Example], list[int]]:
    examples: list[Example] = []
    sources: list[int] = []
    for number, outcome in zip(places, outcomes, strict=True):
        try:
            if isinstance(outcome, RowFault):
                raise outcome
            kept, was_cut = fit(outcome, policy)
        except RowFault as fault:
            count_drop(report, number, fault)
            continue
        report.cut += was_cut
        report.notes.update(outcome.notes)
        examples += kept
        sources += [number] * len(kept)
    return examples, sources


def count_drop(report: Report, number: int, fault: RowFault) -> None:
    """Count a row that was left out: by policy, or because something is wrong with it."""
    if fault.reason in _LENGTH_REASONS:
        report.dropped[fault.reason] += 1
        if len(report.left_out) < report.max_faults:
            report.left_out.append(Fault(number, fault.reason, fault.message))
    else:
        report.add_fault(Fault(number, fault.reason, fault.message))


def bad_rows_error(report: Report) -> DataError:
    """The sentence for a split with bad rows: the first one in full, the others by number."""
    first, *others = report.faults
    more = ""
    if others:
        numbers = ", ".join(str(fault.row) for fault in others[:8])
        more = f" Also at fault: {'row' if len(others) == 1 else 'rows'} {numbers}{' and more' if len(others) > 8 else ''}."
    return DataError(
        f"{report.split} split, row {first.row}: it {first.message}. Mend the data, or leave bad rows out with "
        f"bad_rows='skip'.{more}"
    )
