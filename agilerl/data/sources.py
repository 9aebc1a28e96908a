"""Where rows come from: files, folders, globs, Hub names and objects in memory, alone or mixed."""

from __future__ import annotations

import glob
import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from agilerl.data.files import COLUMNAR, kind_of, read_file
from agilerl.data.image_rows import with_image_paths
from agilerl.data.records import Row, RowFault
from agilerl.errors import DataError

__all__ = ["FileSource", "MemorySource", "RowSource", "SourceLike", "Sources", "open_source"]


class SourceLike(Protocol):
    """How a source is named in a configuration."""

    @property
    def path(self) -> str:
        """File, folder, glob or Hub name."""
        ...

    @property
    def name(self) -> str | None:
        """Configuration of a Hub data set."""
        ...

    @property
    def split(self) -> str | None:
        """Split of a Hub data set."""
        ...

    @property
    def revision(self) -> str | None:
        """Revision of a Hub data set."""
        ...

    @property
    def weight(self) -> float | None:
        """Share in a mix."""
        ...


class RowSource(Protocol):
    """Rows that can be read from the start any number of times."""

    @property
    def is_columnar(self) -> bool:
        """Whether objects may hold nulls that nobody wrote."""
        ...

    @property
    def identity(self) -> str:
        """Changes whenever the rows do; empty where that cannot be known."""
        ...

    def __iter__(self) -> Iterator[Row | RowFault]: ...


@dataclass(frozen=True)
class FileSource:
    """One file."""

    path: Path
    has_images: bool = False
    """Whether relative image paths are taken from the file's folder."""

    @property
    def is_columnar(self) -> bool:
        """Whether it is a Parquet or Arrow file."""
        return kind_of(self.path) in COLUMNAR

    @property
    def identity(self) -> str:
        """Hash of its bytes: a touched file is the same, a changed one never is."""
        stat = self.path.stat()
        return f"{self.path.name}:{_file_hash(self.path, stat.st_size, stat.st_mtime_ns)}"

    def __iter__(self) -> Iterator[Row | RowFault]:
        if not self.has_images:
            return read_file(self.path)
        return (
            row if isinstance(row, RowFault) else with_image_paths(row, self.path.parent)
            for row in read_file(self.path)
        )


@lru_cache(maxsize=256)
def _file_hash(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@dataclass(frozen=True)
class MemorySource:
    """A list of dicts, a ``datasets.Dataset``, or anything else that can be iterated again."""

    rows: Any
    is_columnar: bool = False
    identity: str = ""

    def __iter__(self) -> Iterator[Row | RowFault]:
        for row in self.rows:
            yield row if isinstance(row, dict) else RowFault("not_a_row", f"is {type(row).__name__}, not a dict")


class Sources:
    """Several sources as one: in sequence, or mixed by weight.

    A mix draws the next source at random by weight, from the seed, and ends when a drawn source has no more rows: shares
    hold to the end and no row comes twice.

    Args:
        parts: (source, how to call it, weight or None).
        seed: Decides the mix.
        limit: Most rows.
    """

    def __init__(
        self, parts: Sequence[tuple[RowSource, str, float | None]], *, seed: int = 42, limit: int | None = None
    ) -> None:
        weights = [weight for _, _, weight in parts]
        if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
            raise DataError("Some sources have a weight and some have none; give all of them one, or none.")
        self.parts = list(parts)
        self._seed, self._limit = seed, limit
        self._weights = [weight for weight in weights if weight is not None]
        self._starts: list[tuple[int, str]] = []

    @property
    def is_columnar(self) -> bool:
        """Whether any source is columnar."""
        return any(source.is_columnar for source, _, _ in self.parts)

    @property
    def identity(self) -> str:
        """Changes whenever the rows do; empty where that cannot be known."""
        parts = [(source.identity, weight) for source, _, weight in self.parts]
        return "" if not all(identity for identity, _ in parts) else json.dumps([parts, self._seed, self._limit])

    def with_image_paths(self) -> Sources:
        """The same rows, with image paths of files taken from where each file lies."""
        parts = [
            (replace(source, has_images=True) if isinstance(source, FileSource) else source, label, weight)
            for source, label, weight in self.parts
        ]
        return Sources(parts, seed=self._seed, limit=self._limit)

    def __iter__(self) -> Iterator[tuple[int, Row | RowFault]]:
        rows = self._mixed() if self._weights else self._in_sequence()
        for number, row in enumerate(rows):
            if number == self._limit:
                return
            yield number, row

    def describe(self, number: int) -> str:
        """Which record a row number means, where there are several files."""
        if self._weights or len(self.parts) < 2 or not self._starts:
            return f"row {number}"
        start, label = self._starts[bisect_right([start for start, _ in self._starts], number) - 1]
        return f"row {number - start} of {label}"

    def _in_sequence(self) -> Iterator[Row | RowFault]:
        self._starts = []
        number = 0
        for source, label, _ in self.parts:
            self._starts.append((number, label))
            for row in source:
                yield row
                number += 1

    def _mixed(self) -> Iterator[Row | RowFault]:
        generator = random.Random(self._seed)
        bounds = [sum(self._weights[: index + 1]) for index in range(len(self._weights))]
        iterators = [iter(source) for source, _, _ in self.parts]
        while True:
            drawn = min(bisect_right(bounds, generator.random() * bounds[-1]), len(iterators) - 1)
            row = next(iterators[drawn], None)
            if row is None:
                return
            yield row


def open_source(
    source: SourceLike | str, *, default_split: str = "train", streaming: bool = False
) -> list[tuple[RowSource, str]]:
    """The row sources behind a name, each with how to call it.

    Raises:
        DataError: Nothing is there.
    """
    if isinstance(source, str):
        source = _Named(source)
    path = Path(source.path).expanduser()
    if any(mark in source.path for mark in "*?["):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - the pattern may be absolute
        found = [Path(name) for name in sorted(names)]
        files = [name for name in found if name.is_file() and kind_of(name)]
        if not files:
            raise DataError(f"No data file matches {source.path}.")
        return [(FileSource(name), name.name) for name in files]
    if path.is_file():
        return [(FileSource(path), path.name)]
    if path.is_dir():
        return _folder(path, source.split or default_split)
    if kind_of(path) or path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1:
        raise _missing(path)
    return [_hub(source, default_split, streaming)]


@dataclass(frozen=True)
class _Named:
    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    weight: float | None = None


def _missing(path: Path) -> DataError:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, 1)
    return DataError(f"The data file {path} does not exist.{f' Did you mean {near[0]}?' if near else ''}")


def _folder(path: Path, split: str) -> list[tuple[RowSource, str]]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        from datasets import DatasetDict, load_from_disk

        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            if split not in data:
                raise DataError(f"{path} has no split {split!r}; it has {', '.join(map(str, data))}.")
            data = data[split]
        return [(_of_dataset(data), path.name)]
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and kind_of(file) and not file.name.startswith(".")
    )
    files = [file for file in files if kind_of(file) not in ("md", "txt")] or files
    of_split = [file for file in files if file.stem.startswith(split) or split in file.relative_to(path).parts[:-1]]
    if not files:
        raise DataError(f"The folder {path} holds no data file (jsonl, json, csv, parquet, arrow).")
    return [(FileSource(file), str(file.relative_to(path))) for file in of_split or files]


def _hub(source: SourceLike, default_split: str, streaming: bool) -> tuple[RowSource, str]:
    from datasets import load_dataset

    split = source.split or default_split
    try:
        data = load_dataset(source.path, source.name, split=split, revision=source.revision, streaming=streaming)
    except Exception as error:  # the Hub's client raises dozens of kinds
        reason = str(error).strip().splitlines()
        raise DataError(
            f"The data set {source.path!r} is neither a file here nor one that the Hub gives "
            f"(split {split!r}): {reason[0] if reason else type(error).__name__}"
        ) from None
    return _of_dataset(data), source.path


def _of_dataset(data: Any) -> MemorySource:
    return MemorySource(data, is_columnar=True, identity=str(getattr(data, "_fingerprint", "") or ""))


def as_source(rows: Any, split: str) -> MemorySource:
    """Rows that the user holds in memory.

    Raises:
        DataError: They are nothing that rows can be read from.
    """
    columns = getattr(rows, "column_names", None)
    if isinstance(columns, Mapping):
        raise DataError(f"{split} split: it is a dict of splits ({', '.join(columns)}); pass one of them.")
    if columns is not None or hasattr(rows, "_ex_iterable"):
        return _of_dataset(rows)
    if rows is None or isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"{split} split: it is {'None' if rows is None else type(rows).__name__}; give a datasets.Dataset, an "
            "IterableDataset or a list of dicts."
        )
    return MemorySource(rows)
