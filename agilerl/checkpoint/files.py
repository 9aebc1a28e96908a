"""Files that are either there in full or not at all: hashed while written, flushed to the disk, renamed into place."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agilerl.errors import OutputError

__all__ = [
    "FileRecord",
    "Sink",
    "free_bytes",
    "hash_file",
    "output_errors",
    "remove_tree",
    "replace_link",
    "sync_folder",
    "writing",
]

BLOCK = 4 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


class Sink:
    """A binary file that is hashed as it is written and remembers the first error.

    ``torch.save`` turns an ``OSError`` of the file below it into an unrelated message; ``error`` keeps the cause.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes or a memory view."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), BLOCK):
                block = view[start : start + BLOCK]
                self._file.write(block)
                self._digest.update(block)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Pass buffered bytes on to the system."""
        self._file.flush()

    def record(self) -> FileRecord:
        """Size and hash of what was written."""
        return FileRecord(self.size, self._digest.hexdigest())


@contextmanager
def writing(path: Path) -> Iterator[Sink]:
    """Open a new file for writing and leave it flushed to the disk; the parent folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=BLOCK) as file:
        sink = Sink(file)
        try:
            yield sink
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            if sink.error is not None:
                raise sink.error from error
            raise


def hash_file(path: Path) -> FileRecord:
    """Read a whole file and return its size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link at ``target`` in one step, whatever it pointed at before."""
    aside = link.with_name(f".{link.name}.new-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    try:
        aside.replace(link)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(link.parent)


def remove_tree(path: Path) -> None:
    """Delete a folder that this package made for itself; nothing there is not an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def free_bytes(path: Path) -> int:
    """Bytes that can still be written below ``path`` (its nearest existing parent decides)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def output_errors(path: Path, consequence: str) -> Iterator[None]:
    """Turn system errors into one :class:`OutputError` that names the folder and says what is left."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"no space left ({free_bytes(path) / 2**20:.0f} MiB free); make room or name another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"{error.strerror}; make the folder writable or name another one"
        else:
            where = "" if error.filename in (None, str(path)) else f" ({error.filename})"
            reason = f"{error.strerror or error}{where}"
        failure = OutputError(f"Cannot write to {path}: {reason}. {consequence}".strip())
        failure.errno = error.errno
        raise failure from error
