"""A prepared split and how its rows become batches; the one thing a feed reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agilerl.data.collate import collate_preference, collate_sft
from agilerl.data.records import PreferenceExample
from agilerl.data.report import Report
from agilerl.data.store import Store
from agilerl.typing import Batch

__all__ = ["PreferenceSplit", "SFTSplit", "Split"]


class Split(Protocol):
    """Rows that can be batched by number."""

    report: Report

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of the split."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        ...

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The rows with these numbers, padded; none gives tensors of shape [0, 0]."""
        ...


class SFTSplit:
    """Prompts with responses, or chats."""

    def __init__(self, store: Store, report: Report, pad_id: int) -> None:
        self.store, self.report, self._pad_id = store, report, pad_id
        self._with_weights = not store.is_simple

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of the split."""
        return self.store.fingerprint

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.store.lengths.max(initial=0))

    def __len__(self) -> int:
        return len(self.store)

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The rows with these numbers, padded on the right."""
        return collate_sft(
            [self.store.example(int(row)) for row in rows], self._pad_id, with_weights=self._with_weights
        )


class PreferenceSplit:
    """Prompts with two answers each, in two stores of equal length."""

    def __init__(self, chosen: Store, rejected: Store, report: Report, pad_id: int) -> None:
        self.chosen, self.rejected, self.report, self._pad_id = chosen, rejected, report, pad_id
        self._with_weights = not (chosen.is_simple and rejected.is_simple)

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of either side."""
        return f"{self.chosen.fingerprint}-{self.rejected.fingerprint}"

    @property
    def longest(self) -> int:
        """Tokens of the longest answer with its prompt."""
        return int(max(self.chosen.lengths.max(initial=0), self.rejected.lengths.max(initial=0)))

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The rows with these numbers, padded on the right."""
        pairs = [PreferenceExample(self.chosen.example(int(row)), self.rejected.example(int(row))) for row in rows]
        return collate_preference(pairs, self._pad_id, with_weights=self._with_weights)
