"""The arguments of a training run, checked together."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agilerl.errors import ConfigError

__all__ = ["Options", "check_population", "warn_about_init_hp"]

_COUNTS = (
    "evo_steps",
    "checkpoint_steps",
    "evaluation_interval",
    "max_steps",
    "num_epochs",
    "eval_batches",
    "keep_last",
)
_DEFAULT_FOLDER = "./saved_checkpoints"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Counts, places and switches of a run, resolved: nothing here is a default that means something else."""

    max_steps: int | None
    num_epochs: int | None
    evaluation_interval: int | None
    eval_batches: int | None
    evo_steps: int | None
    checkpoint_steps: int | None
    folder: Path | None
    """Where checkpoints go; None writes none."""
    elite_folder: Path | None
    """Where the elite alone goes; None where the folder's root, which is the elite, is there already."""
    keep_last: int
    keep_best: int
    lora_only: bool
    save_optimizer: bool
    async_save: bool
    on_save_error: Literal["raise", "warn"]
    """What a failing save does: ``"raise"`` stops the run, ``"warn"`` lets it go on."""

    @classmethod
    def check(
        cls,
        *,
        save_elite: bool | None,
        elite_path: str | Path | None,
        checkpoint_path: str | Path | None,
        checkpoints: bool,
        has_selection: bool,
        has_two_selections: bool,
        has_mutation: bool,
        num_env_sources: int,
        **values: Any,
    ) -> Options:
        """Resolve the arguments.

        Raises:
            ConfigError: Some cannot be used; all of them are told in one message.
        """
        problems = [_count_problem(name, values[name]) for name in _COUNTS]
        if num_env_sources != 1:
            problems.append(f"give exactly one of env and env_fn, got {'both' if num_env_sources else 'neither'}")
        if has_two_selections:
            problems.append("selection_strategy and tournament are two names for one thing; give one of them")
        if has_mutation and not has_selection:
            problems.append(
                "mutation without selection keeps nothing good: give selection_strategy (or tournament) too"
            )
        keep_best = values["keep_best"]
        if isinstance(keep_best, bool) or not isinstance(keep_best, int) or keep_best < 0:
            problems.append(f"keep_best must be a whole number of at least 0, got {keep_best!r}")
        if values["on_save_error"] not in ("raise", "warn"):
            problems.append(f"on_save_error must be 'raise' or 'warn', got {values['on_save_error']!r}")
        if found := [problem for problem in problems if problem]:
            raise ConfigError("; ".join(found) + ".")

        for name in _COUNTS:
            values[name] = None if values[name] is None else int(values[name])
        _resolve_counts(values, has_selection)
        folder = Path(checkpoint_path or elite_path or _DEFAULT_FOLDER) if checkpoints else None
        wants_elite = elite_path is not None if save_elite is None else save_elite
        elite_folder = Path(elite_path or _DEFAULT_FOLDER) if wants_elite else None
        if elite_folder is not None and folder is not None and elite_folder.resolve() == folder.resolve():
            elite_folder = None
        return cls(folder=folder, elite_folder=elite_folder, **values)


def check_population(pop: Sequence[Any], env: Any, selection: Any) -> None:
    """Refuse a population that cannot be trained together, or not on this env.

    Raises:
        ConfigError: One message with everything that is wrong.
    """
    agents = list(pop)
    problems: list[str] = []
    if not agents:
        raise ConfigError("pop is empty: give at least one agent.")
    if len({id(agent) for agent in agents}) != len(agents):
        problems.append("pop holds the same agent twice; use agent.clone() or SFT.population()")
    if len(kinds := {type(agent).__name__ for agent in agents}) > 1:
        problems.append(f"pop mixes kinds of agents: {', '.join(sorted(kinds))}")
    size = getattr(selection, "population_size", len(agents))
    if selection is not None and size != len(agents):
        problems.append(f"selection has population_size {size}, pop has {len(agents)} agents; make them equal")
    runtime = agents[0].runtime
    env_world = getattr(env, "world_size", None)
    if env_world is not None and env_world != runtime.dp_size:
        problems.append(
            f"env shards its rows over world_size {env_world}, the run has {runtime.dp_size} data-parallel ranks; "
            f"make the env with world_size={runtime.dp_size} and this process's rank"
        )
    elif env_world is not None and getattr(env, "rank", runtime.dp_rank) != runtime.dp_rank:
        problems.append(f"env has rank {env.rank}, this process is data-parallel rank {runtime.dp_rank}")
    wanted, offered = getattr(agents[0], "objective", None), getattr(env, "objective", None)
    if wanted is not None and offered is not None and wanted != offered:
        problems.append(f"{type(agents[0]).__name__} trains on objective '{wanted}', the env serves '{offered}'")
    positions = getattr(getattr(agents[0].actor, "config", None), "max_position_embeddings", None)
    longest = getattr(env, "longest", None)
    if isinstance(positions, int) and isinstance(longest, int) and longest > positions:
        problems.append(
            f"the longest row has {longest} tokens and the model positions for {positions}; "
            f"make the env with max_context_length={positions}"
        )
    if problems:
        raise ConfigError("; ".join(problems) + ".")


def warn_about_init_hp(init_hp: Mapping[str, Any] | None, agents: Sequence[Any]) -> None:
    """Warn where ``init_hp``, which is log metadata only, contradicts what the agents will do."""
    for key, attribute in (("BATCH_SIZE", "batch_size"), ("UPDATE_EPOCHS", "update_epochs")):
        claimed = (init_hp or {}).get(key)
        real = sorted({getattr(agent, attribute) for agent in agents})
        if claimed is not None and real != [claimed]:
            values = ", ".join(map(str, real))
            warnings.warn(
                f"init_hp says {key}={claimed}, the agents train with {attribute}={values}; init_hp is a note for the "
                "logs and changes nothing.",
                UserWarning,
                stacklevel=3,
            )


def _count_problem(name: str, value: Any) -> str | None:
    if value is None:
        return None
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 1:
        return f"{name} must be a whole number of at least 1, got {value!r}"
    return None


def _resolve_counts(values: dict[str, Any], has_selection: bool) -> None:
    if values["num_epochs"] is not None and values["max_steps"] is not None:
        warnings.warn(
            f"num_epochs={values['num_epochs']} and max_steps={values['max_steps']} are both given; num_epochs wins.",
            UserWarning,
            stacklevel=4,
        )
        values["max_steps"] = None
    elif values["num_epochs"] is None and values["max_steps"] is None:
        values["num_epochs"] = 1
    if has_selection and values["evo_steps"] is None:
        values["evo_steps"] = values["evaluation_interval"] or 10
        _logger.info("evo_steps is not given: selection every %d iterations", values["evo_steps"])
    if values["evo_steps"] is not None and not has_selection:
        warnings.warn(
            f"evo_steps={values['evo_steps']} has no effect without selection_strategy (or tournament).",
            UserWarning,
            stacklevel=4,
        )
        values["evo_steps"] = None
