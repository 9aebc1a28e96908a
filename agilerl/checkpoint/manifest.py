"""The list of a checkpoint's files with size and hash; written last, so its presence means that the rest is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from agilerl.checkpoint.files import FileRecord, writing
from agilerl.checkpoint.layout import MANIFEST
from agilerl.checkpoint.plain import json_safe
from agilerl.errors import CheckpointError

__all__ = ["FORMAT", "Manifest", "read_manifest", "safe_file", "write_manifest"]

FORMAT = 1
_CHECK = "manifest_sha256"


@dataclass
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        files: Relative name -> size and hash.
        links: Relative name -> relative name of the file that it repeats.
        info: What a person or a retention policy may ask: algorithm, step, score, base model.
        format: Version of this layout.
    """

    files: dict[str, FileRecord]
    links: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _check(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text({key: content[key] for key in content if key != _CHECK}).encode()).hexdigest()


def write_manifest(payload: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, flushed to the disk, with a hash of itself."""
    content = json_safe(asdict(manifest), "manifest")
    content[_CHECK] = _check(content)
    with writing(payload / MANIFEST) as sink:
        sink.write(_text(content).encode())


def read_manifest(payload: Path) -> Manifest:
    """Read and check ``manifest.json`` itself; the files it lists are not touched.

    Raises:
        CheckpointError: Missing, damaged in any byte, of a later format, or naming a file outside the folder.
    """
    path = payload / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read; the checkpoint is incomplete.") from error
    try:
        content = json.loads(raw)
        if content.get("format", 0) > FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, this version reads up to {FORMAT}; update the package."
            )
        if raw.decode() != _text(content) or content.get(_CHECK) != _check(content):
            raise CheckpointError(f"{path} is damaged: it does not match its own hash.")
        files = {name: FileRecord(int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        manifest = Manifest(files, dict(content["links"]), dict(content["info"]), int(content["format"]))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not a manifest.") from error
    for name in [*manifest.files, *manifest.links, *manifest.links.values()]:
        safe_file(payload, name)
    return manifest


def safe_file(payload: Path, name: str) -> Path:
    """Path of a listed file; refused when it would leave the folder, by ``..``, an absolute name or a link."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not pure.parts:
        raise CheckpointError(
            f"{payload / MANIFEST} names {name!r}, which is not a file inside the checkpoint; refused."
        )
    path = payload / pure
    if not path.resolve().is_relative_to(payload.resolve()):
        raise CheckpointError(f"{path} leads out of the checkpoint folder; refused.")
    return path
