"""Rows to stores: convert, tokenise, fit and count, in chunks, so that memory does not grow with the rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from agilerl.data.fit import LengthPolicy, fit, fit_preference
from agilerl.data.records import Comparison, Example, PreferenceExample, Record, Row, RowFault
from agilerl.data.report import Fault, Report
from agilerl.data.store import Store, StoreWriter
from agilerl.data.tokenize import RowTokenizer
from agilerl.errors import DataError

__all__ = ["BadRows", "NumberedRows", "Prepared", "bad_rows_error", "nothing_left", "prepare", "prepare_preference"]

BadRows = Literal["raise", "skip"]
NumberedRows = Iterable[tuple[int, Row | RowFault]]
"""Records with their index in the source; a fault stands for a record that could not be read."""

CHUNK_ROWS = 1024

# Reasons that are the settings at work rather than a row at fault.
_POLICY_REASONS = frozenset({"too_long", "prompt_too_long", "no_trained_token", "no_trained_turn"})


@dataclass
class Prepared:
    """A split, ready to be batched, and what happened to its rows."""

    stores: tuple[Store, ...]
    """One for supervised rows; chosen and rejected for preference pairs."""
    report: Report


def prepare(
    rows: NumberedRows,
    convert: Callable[[Row], list[Record]],
    tokenise: Callable[[Sequence[Any]], list[Any]],
    policy: LengthPolicy,
    report: Report,
    *,
    bad_rows: BadRows = "raise",
    folder: Path | None = None,
) -> Prepared:
    """Tokenise a split of supervised rows once.

    Args:
        rows: Records with their index in the source.
        convert: Turns a record into canonical rows.
        tokenise: Turns canonical rows into examples.
        policy: Length budget.
        report: Counts are added here.
        bad_rows: Whether a bad row ends the preparation or is left out and counted.
        folder: Where the store is written; None: memory.

    Raises:
        DataError: A bad row (``bad_rows="raise"``).
    """

    def fit_one(example: Example) -> tuple[list[tuple[Example, ...]], bool]:
        kept, was_cut = fit(example, policy)
        return [(row,) for row in kept], was_cut

    folders = [folder]
    return _prepare(rows, convert, tokenise, fit_one, report, bad_rows, folders)


def prepare_preference(
    rows: NumberedRows,
    convert: Callable[[Row], list[Comparison]],
    tokenise: RowTokenizer,
    policy: LengthPolicy,
    report: Report,
    *,
    bad_rows: BadRows = "raise",
    folder: Path | None = None,
) -> Prepared:
    """Tokenise a split of preference pairs once: two stores of equal length, chosen and rejected."""

    def fit_one(pair: PreferenceExample) -> tuple[list[tuple[Example, ...]], bool]:
        kept, was_cut = fit_preference(pair, policy)
        return [(kept.chosen, kept.rejected)], was_cut

    folders = [folder and folder / side for side in ("chosen", "rejected")]
    return _prepare(rows, convert, tokenise.comparisons, fit_one, report, bad_rows, folders)


def _prepare(
    rows: NumberedRows,
    convert: Callable[[Row], list[Any]],
    tokenise: Callable[[list[Any]], list[Any]],
    fit_one: Callable[[Any], tuple[list[tuple[Example, ...]], bool]],
    report: Report,
    bad_rows: BadRows,
    folders: list[Path | None],
) -> Prepared:
    if bad_rows not in get_args(BadRows):
        raise DataError(f"bad_rows is {bad_rows!r}; it must be 'raise' or 'skip'.")
    writers = [StoreWriter(folder) for folder in folders]
    kept_rows = 0
    # Rows hold no cycles, and the collector would walk the whole heap over and over while they come and go.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        for outcomes, numbers in _one_ahead(tokenise, _converted(rows, convert, report)):
            kept, sources = _fit(outcomes, numbers, fit_one, report)
            kept_rows += len(set(sources))
            for writer, side in zip(writers, zip(*kept, strict=True), strict=True) if kept else ():
                writer.add(side, sources)
            if bad_rows == "raise" and report.faults:
                raise bad_rows_error(report)
        stores = tuple(writer.finish() for writer in writers)
    finally:
        if is_collecting:
            gc.enable()
        for writer in writers:
            writer.close()
    report.rows_kept = kept_rows
    report.examples = len(stores[0])
    report.tokens = sum(int(store.lengths.sum()) for store in stores)
    report.trained_tokens = sum(store.num_targets for store in stores)
    return Prepared(stores, report)


def _converted(
    rows: NumberedRows, convert: Callable[[Row], list[Any]], report: Report
) -> Iterator[tuple[list[Any], list[int]]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        report.rows_in += len(chunk)
        yield _convert(chunk, convert, report)


def _one_ahead(
    work: Callable[[list[Any]], list[Any]], items: Iterable[tuple[list[Any], list[int]]]
) -> Iterator[tuple[list[Any], list[int]]]:
    """The items with the work done on them, in order, while a thread works on the next one.

    A fast tokenizer lets go of the interpreter, so that rows are read, fitted and written meanwhile.
    """
    with ThreadPoolExecutor(1, "tokenise") as pool:
        before: tuple[Future[list[Any]], list[int]] | None = None
        for records, numbers in items:
            begun = pool.submit(work, records), numbers
            if before is not None:
                yield before[0].result(), before[1]
            before = begun
        if before is not None:
            yield before[0].result(), before[1]


def _convert(
    chunk: list[tuple[int, Row | RowFault]], convert: Callable[[Row], list[Any]], report: Report
) -> tuple[list[Any], list[int]]:
    records: list[Any] = []
    numbers: list[int] = []
    for number, row in chunk:
        try:
            if isinstance(row, RowFault):
                raise row
            found = convert(row)
        except RowFault as fault:
            _count(report, number, fault)
            continue
        records += found
        numbers += [number] * len(found)
    return records, numbers


def _fit(
    outcomes: list[Any],
    numbers: list[int],
    fit_one: Callable[[Any], tuple[list[tuple[Example, ...]], bool]],
    report: Report,
) -> tuple[list[tuple[Example, ...]], list[int]]:
    kept: list[tuple[Example, ...]] = []
    sources: list[int] = []
    for number, outcome in zip(numbers, outcomes, strict=True):
        try:
            if isinstance(outcome, RowFault):
                raise outcome
            examples, was_cut = fit_one(outcome)
        except RowFault as fault:
            _count(report, number, fault)
            continue
        if was_cut:
            report.cut += 1
            report.add_finding(number, "cut", f"was cut from {_size(outcome)} to {max(map(_size, examples[0]))} tokens")
        for note in _notes(outcome):
            report.add_finding(number, note, NOTES[note])
        kept += examples
        sources += [number] * len(examples)
    return kept, sources


NOTES = {
    "control_token": "spells a control token in its own text",
    "identical_answers": "has the same answer as chosen and as rejected",
    "ends_with_question": "ends with a turn that nobody answers",
    "repeated_speaker": "has two turns of the same speaker in a row",
    "late_system": "has a system turn after its first turn",
    "result_without_call": "has a tool's result that no call asked for",
    "damaged_text": "holds a character that text does not have: a control character or U+FFFD, left by a wrong decoding",
}
"""Notes about kept rows, as sentences."""


def _size(outcome: Example | PreferenceExample) -> int:
    if isinstance(outcome, PreferenceExample):
        return max(len(outcome.chosen.ids), len(outcome.rejected.ids))
    return len(outcome.ids)


def _notes(outcome: Example | PreferenceExample) -> set[str]:
    if isinstance(outcome, PreferenceExample):
        return {*outcome.chosen.notes, *outcome.rejected.notes}
    return set(outcome.notes)


def _count(report: Report, number: int, fault: RowFault) -> None:
    """Count a row that was left out: by policy, or because something is wrong with it."""
    entry = Fault(number, fault.reason, fault.message)
    if fault.reason in _POLICY_REASONS:
        report.add_left_out(entry)
    else:
        report.add_fault(entry)


def bad_rows_error(report: Report) -> DataError:
    """The sentence for a split with bad rows: the first one in full, the others by number."""
    first, *others = sorted(report.faults, key=lambda fault: fault.row)
    more = ""
    if others:
        numbers = ", ".join(str(fault.row) for fault in others[:8])
        more = f" Also at fault: {'row' if len(others) == 1 else 'rows'} {numbers}{' and more' if len(others) > 8 else ''}."
    return DataError(
        f"{report.split} split, {report.describe(first.row)}: it {first.message}. Mend the data, or leave bad rows out with "
        f"bad_rows='skip'.{more}"
    )


def nothing_left(report: Report) -> DataError:
    """The sentence for a split of which no row could be used."""
    if not report.rows_in:
        return DataError(f"{report.split} split: it is empty; give it at least one row.")
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(report.dropped.items()))
    first = next(iter([*report.faults, *report.left_out]), None)
    example = f" For instance {report.describe(first.row)} {first.message}." if first else ""
    return DataError(
        f"{report.split} split: none of its {report.rows_in} rows is left ({reasons}); raise max_context_length, lower "
        f"min_completion_length, or mend the rows.{example}"
    )
