"""Which checkpoint in a folder is whole?"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from agilerl.checkpoint import layout
from agilerl.checkpoint.files import hash_file
from agilerl.checkpoint.manifest import Manifest, read_manifest, safe_file
from agilerl.errors import CheckpointError

__all__ = ["Problem", "file_problems", "newest_complete"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        file: Name relative to the checkpoint.
        reason: What is wrong with it.
    """

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def file_problems(payload: Path) -> list[Problem]:
    """Compare every file with the manifest, by size and hash; an empty list means that all are as written."""
    try:
        manifest = read_manifest(payload)
    except CheckpointError as error:
        return [Problem(layout.MANIFEST, str(error).removeprefix(f"{payload / layout.MANIFEST} ").rstrip("."))]
    problems = [_compare(payload, name, manifest) for name in sorted(manifest.files)]
    for name, target in sorted(manifest.links.items()):
        path = payload / name
        if not path.exists():
            problems.append(Problem(name, "is missing"))
        elif not path.is_symlink() and not path.samefile(payload / target):  # a copy whose links were resolved
            problems.append(_compare(payload, name, manifest, listed_as=target))
    return [problem for problem in problems if problem is not None]


def _compare(payload: Path, name: str, manifest: Manifest, listed_as: str | None = None) -> Problem | None:
    path, wanted = safe_file(payload, name), manifest.files[listed_as or name]
    try:
        size = path.stat().st_size
        if size != wanted.size:
            state = "is cut off" if size < wanted.size else "was changed"
            return Problem(name, f"{state}: it has {size} bytes instead of {wanted.size}")
        if hash_file(path) != wanted:
            return Problem(name, "was changed: it does not match its hash")
    except FileNotFoundError:
        return Problem(name, "is missing")
    except OSError as error:
        return Problem(name, f"cannot be read ({error.strerror})")
    return None


def newest_complete(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint at or below ``path`` whose files are all as they were written, or None.

    Damaged ones are passed over with a warning that names the file. The result is ``path`` itself where its current
    checkpoint is the one, else the folder of a kept version.
    """
    root = Path(path)
    if not root.is_dir():
        return None
    current = layout.current_version(root)
    candidates = [(number, root / layout.VERSIONS / str(number)) for number in reversed(layout.version_numbers(root))]
    if current is None and (root / layout.MANIFEST).exists():
        candidates.insert(0, (0, root))
    for number, payload in candidates:
        problems = file_problems(payload)
        if not problems:
            return root if number == current else payload
        log.warning("The checkpoint %s is passed over: %s.", payload, problems[0])
    return None
