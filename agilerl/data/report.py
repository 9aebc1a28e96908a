"""Counts of what happened to a split's rows, and what a person is told about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
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
    notices: list[str] = field(default_factory=list)
    """Sentences about the data as a whole, each once."""

    max_faults = 100

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

    def notice(self, sentence: str) -> None:
        """Remember a sentence once."""
        if sentence not in self.notices:
            self.notices.append(sentence)

    @property
    def num_dropped(self) -> int:
        """Rows left out for any reason."""
        return sum(self.dropped.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the cache."""
        return {
            "split": self.split,
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
            "notices": list(self.notices),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """The report that :meth:`as_dict` described."""
        values = dict(values)
        values["dropped"], values["notes"] = Counter(values["dropped"]), Counter(values["notes"])
        values["faults"] = [Fault(**fault) for fault in values["faults"]]
        values["left_out"] = [Fault(**fault) for fault in values["left_out"]]
        return cls(**values)
