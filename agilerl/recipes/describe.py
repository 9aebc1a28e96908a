"""Words of a command line -> a checked description: file, overrides, the bundled demonstration, a run to go on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from agilerl.config import LoadedConfig, load_config
from agilerl.config.yaml import parse
from agilerl.errors import ConfigError

__all__ = ["CONFIG_FILE", "Description", "describe", "find_config"]

CONFIG_FILE = "run.yaml"
"""The effective settings of a run, beside its checkpoint."""

_DEMOS = {"sft": "demo.yaml", "dpo": "demo_dpo.yaml"}


@dataclass(frozen=True)
class Description:
    """A checked description, the checkpoint to go on from, and what differs from the run that wrote it."""

    loaded: LoadedConfig
    resume: Path | None = None
    changes: tuple[tuple[str, str, str], ...] = ()
    file: Path | None = None
    """The description that was given, where it was one in a file."""


def describe(
    words: Iterable[str],
    *,
    options: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    prefer: str = "sft",
) -> Description:
    """Read ``[CONFIG.yaml] [section.key=value ...]`` and the named options of a command.

    Without a file and without training data it is the bundled demonstration. With ``resume`` the settings of that run are
    the base; what file and command line say is new wins over them.

    Raises:
        ConfigError: Anything is wrong; all of it is told at once.
    """
    path, overrides = _split(words)
    given = dict(options or {})
    if resume is not None:
        return _resumed(Path(resume).expanduser(), path, overrides, given, prefer)
    loaded = load_config(path, overrides, options=given, prefer=prefer)
    if path is None and loaded.config.data.train is None:
        demo = files("agilerl").joinpath("assets", _DEMOS[prefer])
        base = parse(demo.read_text(encoding="utf-8")).value
        loaded = load_config(None, overrides, options=given, base=base, base_name="demonstration", prefer=prefer)
    return Description(loaded, file=path)


def find_config(checkpoint: str | Path) -> Path | None:
    """The settings that belong to a checkpoint: in its folder, or in one above it (history lies below a run's folder)."""
    folder = Path(checkpoint).expanduser().absolute()
    return next(
        (place / CONFIG_FILE for place in (folder, *folder.parents[:3]) if (place / CONFIG_FILE).is_file()), None
    )


def _resumed(
    checkpoint: Path, path: Path | None, overrides: list[str], options: dict[str, Any], prefer: str
) -> Description:
    if not checkpoint.exists():
        raise ConfigError(f"There is no checkpoint {checkpoint} to go on from.")
    saved = find_config(checkpoint)
    if saved is None:
        raise ConfigError(f"{checkpoint} has no {CONFIG_FILE} beside it; give the folder that the run was saved to.")
    # The folder may have been moved since; where the description lies is where the run goes on.
    before = load_config(saved, options={"output.path": str(saved.parent)}, prefer=prefer)
    base: dict[str, Any] = before.config.to_dict()
    after = load_config(path, overrides, options=options, base=base, prefer=prefer)
    old, new = ({name: value for name, value, _ in one.rows()} for one in (before, after))
    changes = tuple((name, old[name], new[name]) for name in new if new[name] != old[name])
    return Description(after, checkpoint, changes)


def _split(words: Iterable[str]) -> tuple[Path | None, list[str]]:
    paths, overrides = [], []
    for word in words:
        is_file = "=" not in word and (word.lower().endswith((".yaml", ".yml")) or Path(word).is_file())
        (paths if is_file else overrides).append(word)
    if len(paths) > 1:
        raise ConfigError(f"Give one run description, not {len(paths)}: {', '.join(paths)}.")
    return (Path(paths[0]) if paths else None), overrides
