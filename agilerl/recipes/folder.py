"""The output folder, checked before training and not after."""

from __future__ import annotations

import os
from pathlib import Path

from agilerl.checkpoint import check_writable, existing_checkpoint
from agilerl.errors import OutputError

__all__ = ["keep_file", "prepare_output", "write_aside"]


def prepare_output(path: str | Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Make the folder and see that a checkpoint can be written there.

    Raises:
        OutputError: It is a file, it cannot be written, or another run's checkpoint lies in it.
    """
    folder = Path(path).expanduser()
    check_writable(folder)
    found = existing_checkpoint(folder)
    if found is not None and not (overwrite or resume):
        raise OutputError(
            f"{folder} holds {found} already; go on with it (--resume {folder}), replace it (--overwrite), or give another "
            "folder (--output)."
        )
    return folder


def keep_file(file: Path | None, own: Path) -> None:
    """Refuse to write the run's ``own`` file over the ``file`` that the user wrote.

    Raises:
        OutputError: They are the same.
    """
    if file is not None and own.exists() and own.samefile(file):
        raise OutputError(
            f"{file} lies in the output folder, where the run would write its own {own.name} over it: rename it, give "
            "another folder (--output), or let it be replaced (--overwrite)."
        )


def write_aside(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error}).") from None
