"""A prepared split and how its rows become batches; the one thing a feed reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agilerl.data.collate import collate_preference, collate_sft
from agilerl.data.images import Pictures
from agilerl.data.records import Example, PreferenceExample
from agilerl.data.report import Report
from agilerl.data.store import Store
from agilerl.typing import Batch

__all__ = ["Split", "StoredSplit"]

Rows = Sequence[int] | NDArray[np.int64]


class Split(Protocol):
    """Rows that can be batched by number."""

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of the split."""
        ...

    def __len__(self) -> int: ...

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, padded; none gives tensors of shape [0, 0]."""
        ...


class StoredSplit:
    """A split in one store, or in two of equal length (chosen and rejected), or a part of it.

    Args:
        stores: The tokenised rows.
        report: What happened on the way.
        pad_id: Fills batches.
        rows: The part that this split is; None: all.
        pictures: Makes the model inputs of the rows' images; None where no row has any.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        report: Report,
        pad_id: int,
        rows: NDArray[np.int64] | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self._pictures = pictures
        self.stores, self.report, self._pad_id = tuple(stores), report, pad_id
        self._rows = rows
        self.with_weights = not all(store.is_simple for store in stores)

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of the split."""
        whole = "-".join(store.fingerprint for store in self.stores)
        if self._rows is None:
            return whole
        return hashlib.blake2b(whole.encode() + self._rows.tobytes(), digest_size=16).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(max((store.lengths[self.numbers].max(initial=0) for store in self.stores), default=0))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Row of the store behind each row of the split, [rows]."""
        return np.arange(len(self.stores[0]), dtype=np.int64) if self._rows is None else self._rows

    def __len__(self) -> int:
        return len(self.stores[0]) if self._rows is None else len(self._rows)

    def examples(self, rows: Rows) -> list[tuple[Example, ...]]:
        """The rows with these numbers, one example per store."""
        places = [int(row) if self._rows is None else int(self._rows[row]) for row in rows]
        return [tuple(store.example(place) for store in self.stores) for place in places]

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, padded on the right; none gives tensors of shape [0, 0]."""
        examples = self.examples(rows)
        batch = self.collate(examples, with_weights=self.with_weights)
        if self._pictures is not None and "input_ids" in batch:
            sources = self.stores[0].source_rows[self.numbers[np.asarray(rows, dtype=np.int64)]]
            pairs = zip(sources.tolist(), examples, strict=True)
            batch["inputs"] = [self._pictures.inputs(number, sides[0].ids) for number, sides in pairs]
        return batch

    def collate(self, examples: Sequence[tuple[Example, ...]], *, with_weights: bool) -> Batch:
        """Pad examples on the right."""
        if len(self.stores) == 2:
            pairs = [PreferenceExample(*sides) for sides in examples]
            return collate_preference(pairs, self._pad_id, with_weights=with_weights)
        return collate_sft([sides[0] for sides in examples], self._pad_id, with_weights=with_weights)
