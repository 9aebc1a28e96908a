"""A look at a data set without training on it: every row is read, and what is wrong with any of them is told."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agilerl.config.data import DataSection
from agilerl.data.checks import Finding, check
from agilerl.data.inspect import RowView, view_row
from agilerl.data.report import Report
from agilerl.data.summary import Summary, content_hashes, summarise
from agilerl.errors import DataError
from agilerl.llm_envs.build import SplitBuilder
from agilerl.llm_envs.make import open_sources, split_settings

__all__ = ["Inspection", "inspect_data"]


@dataclass(frozen=True)
class Inspection:
    """What a data set is, row by row and as a whole."""

    summary: Summary
    views: list[RowView]
    findings: list[Finding]
    """Checks that would refuse a run."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return self.summary.as_dict() | {
            "checks": [{"name": finding.name, "message": finding.sentence} for finding in self.findings],
            "rows": [view.as_dict() for view in self.views],
        }


def inspect_data(
    data: DataSection,
    tokenizer: Any,
    *,
    objective: str = "sft",
    rows: int = 3,
    max_positions: int | None = None,
    stop_ids: Sequence[int] = (),
    processor: Any = None,
) -> Inspection:
    """Prepare the train rows of ``data`` as a run would, but leave bad rows out and tell of them.

    Raises:
        DataError: There is nothing to look at.
    """
    named = data.train
    if not named:
        raise DataError("data.train names no rows; give a file, folder, glob or Hub name.")
    if rows < 0:
        raise DataError(f"rows is {rows}; it must be 0 or more.")
    data = data.model_copy(update={"bad_rows": "skip"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        settings = split_settings(data, objective, max_positions)
        builder = SplitBuilder(tokenizer, settings, may_be_empty=True, processor=processor)
        prepared = builder.prepare(open_sources(named, "train", seed=42, limit=data.limit), "train")
    split = builder.part(prepared, prepared.report)
    encoder = builder.encoder
    summary = summarise(split.stores, split.numbers, split.report, encoder)
    hashes = content_hashes(split.stores)
    held_out = None
    if data.test:
        held_out = _held_out_hashes(builder, data, split.report)
        for number in np.flatnonzero(np.isin(hashes, held_out)):
            split.report.add_finding(int(split.stores[0].source_rows[number]), "overlap", "is a held-out row too")
    stops = {*stop_ids, *([] if encoder.eos_id is None else [encoder.eos_id])}
    findings = check(
        summary,
        is_text=split.report.format == "text",
        stop_ids=stops,
        control_ids=encoder.control_ids,
        train_hashes=hashes,
        test_hashes=held_out,
    )
    names = ("",) if len(split.stores) == 1 else ("chosen", "rejected")
    numbers = range(min(rows, len(split)))
    views = [
        view_row(side, int(split.stores[0].source_rows[number]), encoder, name)
        for number, sides in zip(numbers, split.examples(list(numbers)), strict=True)
        for side, name in zip(sides, names, strict=True)
    ]
    return Inspection(summary, views, findings)


def _held_out_hashes(builder: SplitBuilder, data: DataSection, report: Report) -> NDArray[np.uint64]:
    """Content of the held-out rows; those that cannot be used are counted in ``report``."""
    prepared = builder.prepare(open_sources(data.test or (), "test", seed=42, limit=data.limit), "test")
    if faults := prepared.report.faults:
        numbers = ", ".join(str(fault.row) for fault in faults[:8])
        report.notice(f"held-out rows that cannot be used: {numbers}{' and more' if len(faults) > 8 else ''}")
    return content_hashes(prepared.stores)
