"""Counts of what happened to a split's rows, and what a person is told about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = ["Fault", "Report"]


class Fault(NamedTuple):
    """One row that cannot be used."""

    row: int
    """0-based record index in its source."""
    reason: str
    message: str


@dataclass
class Report:
    """What was read, kept, dropped and cut on the way from rows to examples."""

    split: str
    source: str = ""
    """Where the rows came from."""
    format: str = ""
    rows_in: int = 0
    rows_kept: int = 0
    examples: int = 0
    """Rows as they are trained: more than ``rows_kept`` where one record gives several."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    cut: int = 0
    """Rows that were kept but shortened."""
    tokens: int = 0
    trained_tokens: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    """Rows with something worth knowing, such as a control token in their text."""
    faults: list[Fault] = field(default_factory=list)
    """Rows that could not be read, in order; at most the first hundred."""
    left_out: list[Fault] = field(default_factory=list)
    """Rows that the length policy dropped, in order; at most the first hundred."""
    findings: list[Fault] = field(default_factory=list)
    """Rows that are kept but worth a look, at most a hundred for each reason."""
    notices: list[str] = field(default_factory=list)
    """Sentences about the data as a whole, each once."""

    max_faults = 100
    describe: Callable[[int], str] = field(default=lambda number: f"row {number}", repr=False, compare=False)
    """How a row is called in messages."""

    def add_fault(self, fault: Fault) -> None:
        """Count a bad row and remember it among the first ones."""
        self.dropped[fault.reason] += 1
        if len(self.faults) < self.max_faults:
            self.faults.append(fault)

    def add_left_out(self, fault: Fault) -> None:
        """Count a row that the settings leave out and remember it among the first ones."""
        self.dropped[fault.reason] += 1
        if len(self.left_out) < self.max_faults:
            self.left_out.append(fault)

    def add_finding(self, row: int, reason: str, message: str) -> None:
        """Count a note about a kept row and remember it among the first of its kind."""
        self.notes[reason] += 1
        if self.notes[reason] <= self.max_faults:
            self.findings.append(Fault(row, reason, message))

    def notice(self, sentence: str) -> None:
        """Remember a sentence once."""
        if sentence not in self.notices:
            self.notices.append(sentence)

    @property
    def num_dropped(self) -> int:
        """Rows left out for any reason."""
        return sum(self.dropped.values())

    def of_part(self, split: str, rows_kept: int, examples: int, tokens: int, trained_tokens: int) -> Report:
        """The report of a part of this split: what was left out is told with the train part."""
        part = replace(
            self, split=split, rows_kept=rows_kept, examples=examples, tokens=tokens, trained_tokens=trained_tokens
        )
        if split == "train":
            return part
        return replace(
            part,
            rows_in=rows_kept,
            dropped=Counter(),
            cut=0,
            notes=Counter(),
            faults=[],
            left_out=[],
            findings=[],
            notices=[],
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the cache."""
        return {
            "split": self.split,
            "source": self.source,
            "format": self.format,
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "examples": self.examples,
            "dropped": dict(self.dropped),
            "cut": self.cut,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "notes": dict(self.notes),
            "faults": [fault._asdict() for fault in self.faults],
            "left_out": [fault._asdict() for fault in self.left_out],
            "findings": [fault._asdict() for fault in self.findings],
            "notices": list(self.notices),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """The report that :meth:`as_dict` described."""
        values = dict(values)
        values["dropped"], values["notes"] = Counter(values["dropped"]), Counter(values["notes"])
        values["faults"] = [Fault(**fault) for fault in values["faults"]]
        values["findings"] = [Fault(**fault) for fault in values["findings"]]
        values["left_out"] = [Fault(**fault) for fault in values["left_out"]]
        return cls(**values)
