"""Where things lie in a checkpoint folder.

A folder ``path`` looks like this; everything but the numbered payloads is a relative symbolic link::

    path/
      .versions/7/                  a payload: written once, complete, never changed
        manifest.json               size and hash of every file, written last
        attributes.pt               settings, state, optimizer (and the weights with lora_only=False)
        training.pt                 the training loop's state, where a loop wrote the checkpoint
        actor/, reference/, ...     adapters, or the whole model after full fine-tuning
        adapter_model.safetensors   -> actor/adapter_model.safetensors   (PEFT loads the folder itself)
        population/<k>/             the members of an evolving population, each a payload
      .versions/current             -> 7     the one link that a save replaces
      manifest.json                 -> .versions/current/manifest.json, and so on for every name in the payload
      best, history/step-...        -> .versions/N, written by the training loop
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agilerl.checkpoint.files import replace_link, sync_folder
from agilerl.errors import CheckpointError, OutputError

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_TENSORS",
    "ATTRIBUTES",
    "BEST",
    "HISTORY",
    "MANIFEST",
    "POPULATION",
    "ROLES",
    "TRAINING",
    "VERSIONS",
    "check_free",
    "current_version",
    "describe_folder",
    "payload_of",
    "publish",
    "remove_listed",
    "set_link",
    "version_numbers",
]

VERSIONS = ".versions"
CURRENT = "current"
MANIFEST = "manifest.json"
ATTRIBUTES = "attributes.pt"
TRAINING = "training.pt"
POPULATION = "population"
HISTORY = "history"
BEST = "best"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
ROLES = ("actor", "reference", "critic")


def version_numbers(path: Path) -> list[int]:
    """Numbers of the payloads below ``path``, oldest first."""
    folder = path / VERSIONS
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def current_version(path: Path) -> int | None:
    """Number of the payload that the root shows, or None where there is no link.

    Raises:
        CheckpointError: The link leaves the folder.
    """
    link = path / VERSIONS / CURRENT
    if not link.is_symlink():
        return None
    target = str(link.readlink())
    if not target.isdecimal():
        raise CheckpointError(f"{link} points to {target!r}; it must name a payload beside it, so it is not followed.")
    return int(target)


def payload_of(path: Path) -> Path:
    """Folder that holds the files of the checkpoint at ``path``.

    A copy whose links were resolved, a payload itself or a member of a population holds them at its root.

    Raises:
        CheckpointError: There is no checkpoint at ``path``; the message says what is.
    """
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}: it does not exist.")
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}: it is a file; name the folder that holds it.")
    number = current_version(path)
    payload = path if number is None else path / VERSIONS / str(number)
    if not (payload / ATTRIBUTES).is_file():
        raise CheckpointError(f"There is no checkpoint at {path}: {describe_folder(path)}.")
    return payload


def describe_folder(path: Path) -> str:
    """Say what a folder holds instead of a checkpoint, and which folder to name."""
    names = sorted(entry.name for entry in path.iterdir())
    if ADAPTER_CONFIG in names:
        parent = path.resolve().parent
        if (parent / ATTRIBUTES).exists():
            return f"it is one adapter of the checkpoint {parent}; name that folder"
        return (
            f"it holds a PEFT adapter alone ({ADAPTER_CONFIG}, no {ATTRIBUTES}); load it with PeftModel.from_pretrained"
        )
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "it holds a model alone; give it as the model name instead"
    below = [name for name in names if (path / name / ATTRIBUTES).exists()]
    if below:
        return f"checkpoints lie below it ({', '.join(below[:5])}); name one of them"
    if not names:
        return "the folder is empty"
    return f"no {ATTRIBUTES} among {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"


def check_free(path: Path, names: Iterable[str]) -> list[str]:
    """Check that nothing foreign is in the way of root links with these names.

    Returns:
        Names that are in the way but belong to a checkpoint whose links were resolved by copying.

    Raises:
        OutputError: A file that no checkpoint owns has one of the names.
    """
    occupied = [name for name in names if (path / name).exists() and not (path / name).is_symlink()]
    if not occupied:
        return []
    owned = _owned_names(path)
    foreign = [name for name in occupied if name not in owned]
    if foreign:
        raise OutputError(
            f"{path / foreign[0]} is in the way of a checkpoint and was not written by one; move it or name another folder."
        )
    return occupied


def _owned_names(path: Path) -> set[str]:
    """First parts of the names that the manifest at the root lists; empty where there is none."""
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        return {name.split("/")[0] for name in [*content["files"], *content["links"]]} | {MANIFEST}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def publish(path: Path, number: int, resolved: Iterable[str] = ()) -> None:
    """Make payload ``number`` the checkpoint at ``path``: one link is replaced, everything at the root follows.

    Links for new names are made before (they lead nowhere yet) and links for names that are gone are removed after.

    Args:
        path: The checkpoint folder.
        number: A complete payload.
        resolved: Names from :func:`check_free`: files of a resolved copy, which give way to links.
    """
    versions, payload = path / VERSIONS, path / VERSIONS / str(number)
    _check_link(versions / CURRENT)
    for entry in sorted(payload.iterdir()):
        link, target = path / entry.name, f"{VERSIONS}/{CURRENT}/{entry.name}"
        if entry.name not in resolved and not (link.is_symlink() and str(link.readlink()) == target):
            replace_link(link, target)
    replace_link(versions / CURRENT, str(number))
    for name in resolved:
        link, target = path / name, f"{VERSIONS}/{CURRENT}/{name}"
        if link.is_dir():  # no rename replaces a folder by a link, so it steps aside
            link.rename(versions / f".writing-{name}")
        replace_link(link, target)
    for link in path.iterdir():
        is_ours = link.is_symlink() and str(link.readlink()).startswith(f"{VERSIONS}/{CURRENT}/")
        if is_ours and not link.exists():
            link.unlink()
    sync_folder(path)


def _check_link(link: Path) -> None:
    """Move a resolved copy of the current payload out of the way of the link; it is one of the kept payloads too."""
    if link.is_dir() and not link.is_symlink():
        link.rename(link.with_name(".writing-resolved"))


def set_link(link: Path, target: str) -> None:
    """Replace a link of ours.

    Raises:
        OutputError: Something else has the name.
    """
    if link.exists() and not link.is_symlink():
        raise OutputError(f"{link} is in the way and was not written by a checkpoint; move it or name another folder.")
    if not link.is_symlink() or str(link.readlink()) != target:
        replace_link(link, target)


def remove_listed(folder: Path, names: Iterable[str]) -> None:
    """Delete these files and the folders that are empty then; whatever else lies there stays, with its folder."""
    names = list(names)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    parents = {parent for name in names for parent in (folder / name).parents if parent.is_relative_to(folder)}
    for parent in sorted(parents, key=lambda one: len(one.parts), reverse=True):
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
