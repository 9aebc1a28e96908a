"""What is refused before any data is read: another command's run, a base model that moved, settings no search can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agilerl.checkpoint import layout
from agilerl.checkpoint.manifest import read_manifest
from agilerl.config import RunConfig
from agilerl.errors import CheckpointError, ConfigError, ModelError
from agilerl.models.build import resolve_name

__all__ = ["check_base", "check_kind", "check_ranges"]


def check_kind(resume: Path, algorithm: type[Any], command: str) -> None:
    """Refuse to go on with a run that another command trains.

    Raises:
        ConfigError: The checkpoint belongs to another algorithm.
    """
    try:
        found = read_manifest(layout.payload_of(resume)).info.get("algorithm")
    except (CheckpointError, OSError):
        return  # the search for the newest complete checkpoint tells what is wrong
    if found is not None and found != algorithm.__name__:
        raise ConfigError(
            f"{resume} is a run of `agilerl {str(found).lower()}`, which `agilerl {command}` cannot go on with. To start a new "
            f"run from its weights:  agilerl {command} --model {resume}"
        )


def check_base(config: RunConfig, asked: str) -> None:
    """Refuse a base model that is not there any more, and say how to name its new place.

    Args:
        config: The run, its model resolved to a base and an adapter.
        asked: What was asked for as ``model.name``.

    Raises:
        ModelError: There is no such folder.
    """
    try:
        resolve_name(config.model.name)
    except ModelError as error:
        adapter = f" model.adapter={config.model.adapter}" if config.model.name != asked else ""
        whose = f" It is the base model of {asked}." if adapter else ""
        raise ModelError(f"{error}{whose} If it was moved, say where it is now: model.name=NEW{adapter}") from None


def check_ranges(config: RunConfig, algorithm: type[Any]) -> None:
    """Refuse to search settings that the algorithm has not.

    Raises:
        ConfigError: ``evolution.ranges`` names one.
    """
    unknown = [name for name in config.evolution.ranges if name not in algorithm.mutable]
    if unknown and config.evolution.population_size > 1:
        raise ConfigError(
            f"evolution.ranges names {', '.join(unknown)}, which {algorithm.__name__} has not; possible: "
            f"{', '.join(algorithm.mutable)}."
        )
