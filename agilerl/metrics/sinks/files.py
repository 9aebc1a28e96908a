"""Log files: CSV with a stable header, and JSON lines. Both can be continued after a resume."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from agilerl.metrics.log import RECORD_KEYS, Record

__all__ = ["CSVSink", "JSONLSink"]


class _FileSink:
    """A text file of records, one a line, opened at the first record.

    Without ``resume`` an existing file of an earlier run is moved aside, never mixed with or overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._keep: int | None = None

    def resume(self, records: int, rows: int) -> None:
        """Continue the file after its first ``records`` records."""
        del rows  # several records may share a row count, so the number of records is what counts
        self._keep = records

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._kept_lines()
            if kept is None and self.path.exists() and self.path.stat().st_size:
                self.path.rename(_free_name(self.path))
            if kept is not None:
                _replace(self.path, kept)
            self._file = self.path.open("a", encoding="utf-8", newline="")
            self._begin(self._file)
        return self._file

    def _kept_lines(self) -> list[str] | None:
        """Lines of the existing file that the continued run keeps; ``None`` when nothing is to be continued."""
        if self._keep is None or not self.path.exists():
            return None
        with self.path.open(encoding="utf-8", newline="") as file:
            complete = [line for line in file if line.endswith("\n")]
        return self._trim(complete, self._keep)

    def _trim(self, lines: list[str], records: int) -> list[str]:
        return lines[:records]

    def _begin(self, file: TextIO) -> None:
        """Write what stands before the first record."""


class CSVSink(_FileSink):
    """``csv.DictReader``-friendly: one header, blanks where a record has no value, columns only ever added.

    A key seen for the first time becomes a new column at the end: the file is rewritten aside and renamed.
    """

    def __init__(self, path: str | Path, columns: Iterable[str] = RECORD_KEYS) -> None:
        super().__init__(path)
        self.columns = list(columns)

    def write(self, record: Record) -> None:
        """Append one row."""
        file = self._open()
        new = [key for key in record if key not in self.columns]
        if new:
            file = self._widen(new)
        file.write(_csv_line(self._cell(record.get(name)) for name in self.columns))
        file.flush()

    def _begin(self, file: TextIO) -> None:
        if self.path.stat().st_size == 0:
            file.write(_csv_line(self.columns))
            return
        with self.path.open(encoding="utf-8", newline="") as existing:
            self.columns = next(csv.reader(existing))

    def _trim(self, lines: list[str], records: int) -> list[str]:
        return lines[: records + 1]  # the header is a line too

    def _widen(self, new: list[str]) -> TextIO:
        self.close()
        with self.path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        self.columns = [*rows[0], *new]
        _replace(self.path, [_csv_line(self.columns), *(_csv_line([*row, *[""] * len(new)]) for row in rows[1:])])
        self._file = self.path.open("a", encoding="utf-8", newline="")
        return self._file

    @staticmethod
    def _cell(value: float | int | str | None) -> str:
        if value is None:
            return ""
        # A line break inside a cell would make "one record, one line" false, and resuming counts lines.
        return str(value).replace("\r", " ").replace("\n", " ")


class JSONLSink(_FileSink):
    """One strict JSON object a line; NaN and infinity become ``null``."""

    def write(self, record: Record) -> None:
        """Append one object."""
        file = self._open()
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        file.write(json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def _csv_line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(list(cells))
    return buffer.getvalue()


def _replace(path: Path, lines: Iterable[str]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _free_name(path: Path) -> Path:
    def names() -> Iterator[Path]:
        number = 1
        while True:
            yield path.with_name(f"{path.stem}.{number}{path.suffix}")
            number += 1

    return next(name for name in names() if not name.exists())
