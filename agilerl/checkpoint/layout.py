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

from pathlib import Path

from agilerl.checkpoint.files import replace_link, sync_folder
from agilerl.errors import CheckpointError

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
    "current_version",
    "describe_folder",
    "payload_of",
    "publish",
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


def publish(path: Path, number: int) -> None:
    """Make payload ``number`` the checkpoint at ``path``: one link is replaced, everything at the root follows.

    Links for new names are made before (they lead nowhere yet) and links for names that are gone are removed after.
    """
    payload = path / VERSIONS / str(number)
    for entry in sorted(payload.iterdir()):
        link, target = path / entry.name, f"{VERSIONS}/{CURRENT}/{entry.name}"
        if link.is_symlink() and str(link.readlink()) == target:
            continue
        if link.exists() and not link.is_symlink():
            continue  # a copy whose links were resolved; see adopt()
        replace_link(link, target)
    replace_link(path / VERSIONS / CURRENT, str(number))
    for link in path.iterdir():
        is_ours = link.is_symlink() and str(link.readlink()).startswith(f"{VERSIONS}/{CURRENT}/")
        if is_ours and not link.exists():
            link.unlink()
    sync_folder(path)
