"""One fine-tuning run from a checked description to a saved, measured model. Read :func:`fine_tune` top to bottom."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.config import RunConfig
from agilerl.config.yaml import dump
from agilerl.distributed import get_rank
from agilerl.metrics import Sink
from agilerl.metrics.sinks import ConsoleSink, CSVSink, JSONLSink, TensorBoardSink, WandbSink
from agilerl.recipes.checks import check_base, check_kind, check_ranges
from agilerl.recipes.describe import CONFIG_FILE, Description
from agilerl.recipes.folder import keep_file, prepare_output, write_aside
from agilerl.recipes.images import processor_for
from agilerl.recipes.report import Reporter
from agilerl.recipes.setup import (
    build_agents,
    build_env,
    evolution_of,
    load_tokenizer_for,
    starting_point,
    total_rows,
)
from agilerl.training.llm import train_llm_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agilerl.metrics import Record

__all__ = ["WINNER_FILE", "Recipe", "Result", "fine_tune"]

WINNER_FILE = "winner.yaml"
"""The run's description with the settings that evolution found, for a single agent."""


@dataclass(frozen=True)
class Recipe:
    """What differs between the kinds of fine-tuning."""

    name: str
    """Section of the description that holds the algorithm's settings."""
    objective: str
    """Objective of the data."""
    algorithm: type[Any]
    measure: Callable[..., Any]
    """(agent, env, evaluation section, progress=) -> numbers with ``as_dict``."""
    measured: Callable[[Reporter, str, Any], None]
    """Tell one measurement."""
    compare: Callable[[Reporter, Any, Any, int], None]
    """Tell the difference that training made."""


@dataclass
class Result:
    """What came out of a run."""

    folder: Path
    before: Any = None
    after: Any = None
    fitness: list[float] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Searched settings of the best agent."""


def fine_tune(description: Description, recipe: Recipe, reporter: Reporter | None = None) -> Result:
    """Run a description: check, load, measure, train, measure again, save.

    Args:
        description: What to do, checked; and the checkpoint to go on from, if any.
        recipe: SFT or another kind.
        reporter: Tells a person about it.

    Raises:
        AgileRLError: Something the user can put right; everything that can be checked is checked before training.
        Interrupted: Stopped by a signal; a checkpoint was saved if training had begun.
    """
    resume = description.resume
    if resume is not None:
        check_kind(resume, recipe.algorithm, recipe.name)
    check_ranges(description.loaded.config, recipe.algorithm)
    config = starting_point(description.loaded.config)
    check_base(config, description.loaded.config.model.name)
    report = reporter or Reporter(is_main=get_rank() == 0)
    folder = prepare_output(config.output.path, overwrite=config.output.overwrite, resume=resume is not None)
    if not config.output.overwrite:
        keep_file(description.file, folder / CONFIG_FILE)
    report.opening(recipe.name, folder, description)

    tokenizer = load_tokenizer_for(config.model)
    processor = processor_for(config, recipe.objective)
    env = build_env(config, tokenizer, objective=recipe.objective, processor=processor)
    report.data(env)
    agents = build_agents(config, recipe.algorithm, getattr(config, recipe.name), env.tokenizer_with_template, env)
    report.agent(agents[0])
    is_main, settings = agents[0].runtime.is_main, _SettingsSink(folder / CONFIG_FILE, description.loaded.to_yaml())
    if is_main and resume is None:
        settings.save()

    total = total_rows(config, env)
    before = None if resume else _measure(recipe, report, "before", agents[0], env, config)
    with _sinks(config, folder, total, agents[0]) as sinks:
        population, fitness = train_llm_dataset(
            agents,
            env,
            init_hp={"BATCH_SIZE": agents[0].batch_size, "UPDATE_EPOCHS": agents[0].update_epochs},
            checkpoint_path=folder,
            checkpoint_steps=config.checkpoint.steps,
            evaluation_interval=config.training.evaluation_interval,
            eval_batches=config.training.eval_batches,
            max_steps=config.training.max_steps,
            num_epochs=config.training.epochs,
            verbose=False,
            resume=resume,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            lora_only=config.checkpoint.lora_only,
            save_optimizer=config.checkpoint.save_optimizer,
            async_save=config.checkpoint.background,
            on_save_error=config.checkpoint.on_error,
            sinks=[*sinks, settings] if is_main else sinks,
            **evolution_of(config, total, agents[0].batch_size),
        )
    if is_main:
        settings.save()
    best = max(range(len(population)), key=lambda place: fitness[place])
    after = _measure(recipe, report, "after", population[best], env, config)
    if before is not None and after is not None:
        recipe.compare(report, before, after, config.evaluation.samples)
    searched = {name: getattr(population[best], name) for name in population[best].hp_config or ()}
    if searched:
        _tell_winner(report, config, recipe.name, searched, folder)
    report.next_command(folder)
    for agent in population:
        agent.clean_up()
    env.close()
    return Result(folder, before, after, fitness, searched)


class _SettingsSink:
    """Saves the run's settings at its first record: settings that a checkpoint refused must not replace its own."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text, self._is_saved = path, text, False

    def save(self) -> None:
        if not self._is_saved:
            write_aside(self._path, self._text)
            self._is_saved = True

    def write(self, record: Record) -> None:
        self.save()

    def close(self) -> None:
        pass


def _measure(recipe: Recipe, report: Reporter, label: str, agent: Any, env: Any, config: RunConfig) -> Any:
    if not config.evaluation.enabled:
        return None
    with report.answering(label) as progress:
        result = recipe.measure(agent, env, config.evaluation, progress=progress)
    recipe.measured(report, f"{label:<7}", result)
    return result


def _tell_winner(report: Reporter, config: RunConfig, section: str, searched: dict[str, Any], folder: Path) -> None:
    """The history of the search and the settings that won, as a description that is ready for the next run."""
    report.lineage(folder)
    settings = config.to_dict()
    settings[section] |= searched
    settings["evolution"]["population_size"] = 1
    settings["output"] = {key: value for key, value in settings["output"].items() if key != "path"}
    report.say()
    report.say("Settings of the best member:")
    for name, value in searched.items():
        report.say(f"  {section}.{name}: {value:.6g}" if isinstance(value, float) else f"  {section}.{name}: {value}")
    if get_rank() == 0:
        write_aside(folder / WINNER_FILE, dump(settings))
        report.say(f"They are ready for the next run:  agilerl {section} {shlex.quote(str(folder / WINNER_FILE))}")


@contextmanager
def _sinks(config: RunConfig, folder: Path, total: int | None, agent: Any) -> Iterator[list[Sink]]:
    """The asked-for places for records; other ranks than the first have none."""
    log = config.log
    place = Path(log.folder) if log.folder is not None else folder / "logs"
    sinks: list[Sink] = []
    if agent.runtime.is_main:
        if log.console != "off":
            sinks.append(ConsoleSink(total, live={"live": True, "plain": False}.get(log.console)))
        if log.csv:
            sinks.append(CSVSink(place / "metrics.csv"))
        if log.jsonl:
            sinks.append(JSONLSink(place / "metrics.jsonl"))
        if log.tensorboard:
            sinks.append(TensorBoardSink(place / "tensorboard"))
        if log.wandb:
            sinks.append(WandbSink(config=config.to_dict(), project=log.wandb_project, dir=str(place)))
    yield sinks
