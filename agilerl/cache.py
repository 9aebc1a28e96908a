"""The folder for what can be made again: converted models, tokenised data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agilerl.errors import OutputError

__all__ = ["cache_folder", "locked"]


def cache_folder() -> Path:
    """``$AGILERL_CACHE``, else ``agilerl`` in the user's cache folder; made when missing.

    Raises:
        OutputError: The folder cannot be made or written.
    """
    folder = Path(os.environ["AGILERL_CACHE"]) if os.environ.get("AGILERL_CACHE") else _user_caches() / "agilerl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise OutputError(f"the cache folder {folder} cannot be written: set AGILERL_CACHE to one that can")
    return folder


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (a file, made when missing) among processes; a killed holder lets go of it."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock
