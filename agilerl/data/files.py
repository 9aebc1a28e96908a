"""Local files to rows, one reader per kind; a record that cannot be read is a fault that names the file and line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from agilerl.data.records import Row, RowFault
from agilerl.errors import DataError

__all__ = ["READERS", "kind_of", "read_file"]

Rows = Iterator[Row | RowFault]
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BOM = b"\xef\xbb\xbf"


def kind_of(path: Path) -> str | None:
    """The kind of a file by its name, compression aside; None: not a data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _OPENERS:
        suffixes.pop()
    kind = suffixes[-1].lstrip(".") if suffixes else ""
    return kind if kind in READERS else None


def read_file(path: Path) -> Rows:
    """Rows of a file, in order, with a fault in place of each record that cannot be read.

    Raises:
        DataError: The file as a whole cannot be read.
    """
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"{path} is not a data file that is understood; its name should end in {', '.join(sorted(READERS))}."
        )
    try:
        yield from READERS[kind](path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _open(path: Path) -> IO[bytes]:
    return _OPENERS.get(path.suffix.lower(), open)(path, "rb")


def _jsonl(path: Path) -> Rows:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(_BOM):
                line = line[len(_BOM) :]
            if not line.strip():
                continue
            yield _json_row(line.rstrip(b"\r\n"), f"{path.name}:{number}")


def _json_row(line: bytes, where: str) -> Row | RowFault:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowFault("bad_encoding", f"holds a byte that is not UTF-8 (byte {error.start} of {where})")
    except (ValueError, RecursionError) as error:
        return RowFault("bad_json", f"is not JSON ({_what_is_wrong(error)} of {where})")
    return _object(row, where)


def _what_is_wrong(error: Exception) -> str:
    """An error of the JSON reader in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def _object(row: Any, where: str) -> Row | RowFault:
    if isinstance(row, dict):
        return row
    return RowFault("bad_json", f"is {type(row).__name__}, not an object ({where})")


def _json(path: Path) -> Rows:
    with _open(path) as file:
        raw = file.read()
    raw = raw.removeprefix(_BOM)
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} holds a byte that is not UTF-8 (line {line}, byte {error.start} of the file)."
        ) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under another name
            yield from _jsonl(path)
            return
        raise DataError(f"{path}:{error.lineno} is not JSON: {_what_is_wrong(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON that can be read: {_what_is_wrong(error)}.") from None
    if isinstance(value, dict):
        lists = [
            member for member in value.values() if isinstance(member, list) and member and isinstance(member[0], dict)
        ]
        value = lists[0] if len(lists) == 1 and len(value) <= 3 else [value]  # {"data": [...]}, perhaps with a version
    if not isinstance(value, list):
        raise DataError(f"{path} holds {type(value).__name__}; a JSON file should hold a list of objects.")
    for index, row in enumerate(value):
        yield _object(row, f"{path.name}, item {index}")


def _csv(path: Path) -> Rows:
    """Cells are text and stay text, whatever they spell."""
    csv.field_size_limit(sys.maxsize if sys.maxsize < 2**31 else 2**31 - 1)
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        first = text.readline()
        text.seek(0)
        reader = csv.reader(text, delimiter=_delimiter(path, first))
        header = next(reader, None)
        if header is None:
            return
        duplicates = {name for name in header if header.count(name) > 1}
        if duplicates:
            raise DataError(f"{path} has more than one column {', '.join(map(repr, sorted(duplicates)))}; rename them.")
        try:
            for cells in reader:
                if cells:
                    yield _csv_row(header, cells, f"{path.name}:{reader.line_num}")
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num} is not CSV: {error}.") from None


def _csv_row(header: list[str], cells: list[str], where: str) -> Row | RowFault:
    if len(cells) != len(header):
        return RowFault("bad_csv", f"has {len(cells)} cells where the header has {len(header)} ({where})")
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
            return RowFault("bad_encoding", f"holds a byte that is not UTF-8 in '{name}' ({where})")
    return dict(zip(header, cells, strict=True))


def _delimiter(path: Path, first_line: str) -> str:
    if ".tsv" in [suffix.lower() for suffix in path.suffixes]:
        return "\t"
    return max(",;\t", key=lambda mark: (first_line.count(mark), mark == ","))


def _parquet(path: Path) -> Rows:
    import pyarrow.lib
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.lib.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None


def _arrow(path: Path) -> Rows:
    import pyarrow
    import pyarrow.lib

    with path.open("rb") as head:
        is_file = head.read(6) == b"ARROW1"
    try:
        with pyarrow.memory_map(str(path)) as source:
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                for index in range(reader.num_record_batches):
                    yield from reader.get_batch(index).to_pylist()
            else:
                for batch in pyarrow.ipc.open_stream(source):
                    yield from batch.to_pylist()
    except pyarrow.lib.ArrowInvalid as error:
        raise DataError(f"{path} is not an Arrow file: {str(error).splitlines()[0]}") from None


def _text(path: Path) -> Rows:
    with _open(path) as file:
        raw = file.read().removeprefix(_BOM)
    try:
        yield {"text": raw.decode("utf-8").replace("\r\n", "\n")}
    except UnicodeDecodeError as error:
        yield RowFault("bad_encoding", f"holds a byte that is not UTF-8 (byte {error.start} of {path.name})")


READERS: dict[str, Callable[[Path], Rows]] = {
    "jsonl": _jsonl,
    "ndjson": _jsonl,
    "json": _json,
    "csv": _csv,
    "tsv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
    "feather": _arrow,
    "txt": _text,
    "md": _text,
}
"""Reader of each kind of file."""

COLUMNAR = frozenset({"parquet", "arrow", "feather"})
"""Kinds whose objects hold nulls that nobody wrote."""
