"""Tokenised rows as flat arrays, in memory or on disk; nothing here grows a Python object per row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from agilerl.data.records import Example, Span

__all__ = ["Store", "StoreWriter"]

COLUMNS: dict[str, str] = {
    "ids": "int32",  # [tokens]
    "num_ids": "int32",  # [rows]
    "span_start": "int32",  # [spans]
    "span_end": "int32",
    "span_weight": "float32",
    "num_spans": "int32",  # [rows]
    "prompt_length": "int32",
    "text": "uint8",  # [bytes], prompt then response of each row, UTF-8
    "num_prompt_bytes": "int64",  # [rows]
    "num_response_bytes": "int64",
    "source_row": "int64",  # 0-based record index in the source
    "content_hash": "uint64",  # of the ids: equal rows have equal hashes
}


class StoreWriter:
    """Takes examples in order and becomes a :class:`Store`.

    Args:
        folder: Where the arrays are written as they come, so that memory stays flat; None: kept in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._hash = hashlib.blake2b(digest_size=16)
        self._chunks: dict[str, list[NDArray]] = {name: [] for name in COLUMNS}
        self._files: dict[str, BinaryIO] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}

    def add(self, examples: Sequence[Example], source_rows: Sequence[int]) -> None:
        """Append examples with the record index that each came from."""
        if not examples:
            return
        spans = [span for example in examples for span in example.spans]
        texts = [(_bytes(example.prompt), _bytes(example.response)) for example in examples]
        columns: dict[str, NDArray] = {
            "ids": np.concatenate([example.ids for example in examples]),
            "num_ids": np.array([len(example.ids) for example in examples]),
            "span_start": np.array([span[0] for span in spans]),
            "span_end": np.array([span[1] for span in spans]),
            "span_weight": np.array([span[2] for span in spans]),
            "num_spans": np.array([len(example.spans) for example in examples]),
            "prompt_length": np.array([example.prompt_length for example in examples]),
            "text": np.frombuffer(b"".join(part for pair in texts for part in pair), dtype=np.uint8),
            "num_prompt_bytes": np.array([len(prompt) for prompt, _ in texts]),
            "num_response_bytes": np.array([len(response) for _, response in texts]),
            "source_row": np.asarray(source_rows),
            "content_hash": np.array(
                [_content_hash(example) for example in examples],
                dtype=np.uint64,
            ),
        }
        for name, values in columns.items():
            values = np.ascontiguousarray(values, dtype=COLUMNS[name])
            if name not in ("text", "source_row"):
                self._hash.update(values.data)
            if self._folder is None:
                self._chunks[name].append(values)
            else:
                self._files[name].write(values.data)

    def close(self) -> None:
        """Close the files, if any; what was written stays."""
        for file in self._files.values():
            file.close()

    def finish(self) -> Store:
        """The finished store."""
        self.close()
        if self._folder is not None:
            return Store.open(self._folder, self._hash.hexdigest())
        columns = {
            name: np.concatenate(chunks) if chunks else np.empty(0, COLUMNS[name])
            for name, chunks in self._chunks.items()
        }
        return Store(columns, self._hash.hexdigest())


def _content_hash(example: Example) -> int:
    content = example.ids.tobytes() + example.image_digest
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Store:
    """Random access to tokenised rows."""

    def __init__(self, columns: dict[str, NDArray], fingerprint: str) -> None:
        self.columns = columns
        self.fingerprint = fingerprint
        """Hash of the ids, spans and prompt lengths, in order."""
        self.lengths: NDArray[np.int32] = columns["num_ids"]
        """Tokens of each row, [rows]."""
        self.prompt_lengths: NDArray[np.int32] = columns["prompt_length"]
        self.source_rows: NDArray[np.int64] = columns["source_row"]
        self._first_id = _starts(columns["num_ids"])
        self.first_ids: NDArray[np.int64] = self._first_id[:-1]
        """Where each row begins in ``columns["ids"]``, [rows]."""
        self._first_span = _starts(columns["num_spans"])
        self._first_byte = _starts(columns["num_prompt_bytes"] + columns["num_response_bytes"])

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> Store:
        """The store that a writer left in ``folder``; the long arrays stay on disk until touched."""
        columns: dict[str, NDArray] = {}
        for name, dtype in COLUMNS.items():
            path = folder / f"{name}.bin"
            is_long = name in ("ids", "text") and path.stat().st_size > 0
            columns[name] = np.memmap(path, dtype=dtype, mode="r") if is_long else np.fromfile(path, dtype=dtype)
        return cls(columns, fingerprint)

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, row: int) -> NDArray[np.int32]:
        """Token ids of a row, [l]."""
        return np.array(self.columns["ids"][self._first_id[row] : self._first_id[row + 1]])

    def spans(self, row: int) -> tuple[Span, ...]:
        """Trained runs of a row."""
        part = slice(self._first_span[row], self._first_span[row + 1])
        columns = (self.columns[name][part].tolist() for name in ("span_start", "span_end", "span_weight"))
        return tuple(Span(*values) for values in zip(*columns, strict=True))

    def texts(self, row: int) -> tuple[str, str]:
        """Prompt and response of a row as a person reads them."""
        start = int(self._first_byte[row])
        middle = start + int(self.columns["num_prompt_bytes"][row])
        text = self.columns["text"]
        parts = (text[start:middle], text[middle : self._first_byte[row + 1]])
        prompt, response = (part.tobytes().decode("utf-8", "surrogatepass") for part in parts)
        return prompt, response

    def example(self, row: int) -> Example:
        """One row."""
        prompt, response = self.texts(row)
        return Example(self.ids(row), self.spans(row), int(self.prompt_lengths[row]), prompt, response)

    @property
    def targets_per_row(self) -> NDArray[np.int64]:
        """Trained tokens of each row, [rows]."""
        columns = self.columns
        start = np.maximum(columns["span_start"], 1).astype(np.int64)
        counts = np.maximum(columns["span_end"] - start, 0) * (columns["span_weight"] != 0)
        return np.diff(np.concatenate([[0], np.cumsum(counts)])[self._first_span])

    @property
    def num_targets(self) -> int:
        """Trained tokens of all rows."""
        return int(self.targets_per_row.sum())

    @property
    def is_simple(self) -> bool:
        """Whether every row trains exactly what follows its prompt, with weight 1, so that prompt lengths say it all."""
        columns = self.columns
        if len(columns["span_start"]) != len(self) or not bool((columns["num_spans"] == 1).all()):
            return False
        return (
            bool((columns["span_start"] == columns["prompt_length"]).all())
            and bool((columns["span_end"] == columns["num_ids"]).all())
            and bool((columns["span_weight"] == 1.0).all())
        )


def _starts(counts: NDArray) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
