"""A run: everything that moves while it goes on, so that it can be saved and restored together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.checkpoint import newest_complete, plain, read_checkpoint
from agilerl.errors import CheckpointError
from agilerl.training.llm.budget import Budget
from agilerl.training.llm.checkpointing import Keeper
from agilerl.training.llm.evaluation import Evaluation
from agilerl.training.llm.evolution import Evolution
from agilerl.training.llm.logs import RunLog
from agilerl.training.llm.options import Options
from agilerl.training.llm.signals import Stop
from agilerl.training.llm.trainee import Trainee

__all__ = ["Run", "find_checkpoint"]

_FORMAT = 1
_SETTINGS = ("max_steps", "num_epochs", "evaluation_interval", "eval_batches", "evo_steps", "checkpoint_steps")
_logger = logging.getLogger(__name__)


def find_checkpoint(resume: bool | str | Path | None, folder: Path | None) -> Path | None:
    """Return the checkpoint to go on from, or None to begin afresh.

    ``True``: the newest complete one in the run's own folder, if there is any. A path: the newest complete one there.

    Raises:
        CheckpointError: A path was named and nothing complete is there.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        found = None if folder is None or not folder.exists() else newest_complete(folder)
        if found is None:
            _logger.info("No complete checkpoint in %s yet: training begins afresh.", folder)
        return found
    found = newest_complete(Path(resume))
    if found is None:
        raise CheckpointError(f"There is no complete checkpoint at {resume} to resume from.")
    return found


def _is_within(path: Path, folder: Path | None) -> bool:
    return folder is None or path.resolve().is_relative_to(folder.resolve())


@dataclasses.dataclass
class Run:
    """The variables of the training loop, and its parts."""

    options: Options
    runtime: Any
    budget: Budget
    trainees: list[Trainee]
    evaluation: Evaluation
    evolution: Evolution | None
    log: RunLog
    keeper: Keeper
    stop: Stop
    iteration: int = 0
    is_finished: bool = False
    is_saved: bool = False
    """Whether the end of the run is in its own folder."""

    @property
    def is_spent(self) -> bool:
        """Whether every member has had the whole budget."""
        return self.budget.is_spent(self.trainees)

    def save(self) -> None:
        """Write a checkpoint of the run as it is now."""
        self.keeper.save(self.trainees, self.state_dict())
        self.stop.path = self.options.folder

    def stop_if_asked(self) -> None:
        """Save and leave if any rank got Ctrl-C or SIGTERM.

        Raises:
            Interrupted: The run was stopped by Ctrl-C, and saved before.
            Terminated: The same by SIGTERM.
        """
        if self.runtime.any(self.stop.requested is not None):
            self.save()
            self.keeper.close()
            self.stop.finish()

    def resume(self, source: bool | str | Path | None) -> bool:
        """Go on from a checkpoint if asked to and there is one; return whether that was so."""
        path = find_checkpoint(source, self.options.folder) if self.runtime.is_main else None
        path = self.runtime.broadcast(path)  # one answer for all ranks, whatever their view of a shared disk
        if path is not None:
            self.restore(path)
            self.is_saved = self.is_finished and self.runtime.broadcast(_is_within(path, self.options.folder))
        self.keeper.start(path)
        return path is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without the agents."""
        return {
            "format": _FORMAT,
            "iteration": self.iteration,
            "is_finished": self.is_finished,
            "eval_batches": self.evaluation.batches,
            "members": [trainee.state_dict() for trainee in self.trainees],
            "evolution": None if self.evolution is None else self.evolution.state_dict(),
            "log": self.log.state_dict(),
            "settings": {name: getattr(self.options, name) for name in _SETTINGS},
        }

    def restore(self, path: Path) -> None:
        """Go on from the checkpoint at ``path``: every member, its place in the data, and all generators.

        Run settings and hyper-parameters follow one rule. What the resuming call gives counts, and every difference is
        logged as old -> new; only hyper-parameters that mutation moves are the checkpoint's, because they are results.

        Raises:
            CheckpointError: It was not written by a training loop, or by one of another shape.
        """
        content = read_checkpoint(path, need_optimizer=False, need_tokenizer=False)
        state = content.training
        if state is None:
            raise CheckpointError(f"{path} holds an agent but no training run; load it with load_checkpoint instead.")
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"{path} has training state of format {state.get('format')!r}, expected {_FORMAT}.")
        self._check_shape(path, state)
        several = len(self.trainees) > 1
        for place, (trainee, saved) in enumerate(zip(self.trainees, state["members"], strict=True)):
            self._restore_member(trainee, saved, path / "population" / str(place) if several else path)
        if self.evolution is not None:
            self.evolution.load_state_dict(state["evolution"])
        self.iteration = int(state["iteration"])
        self.is_finished = bool(state["is_finished"])
        if self.options.eval_batches is None:
            self.evaluation.batches = int(state["eval_batches"])
        self.keeper.saved_rows = max(trainee.rows for trainee in self.trainees)
        self.log.load_state_dict(state["log"])
        now = {name: getattr(self.options, name) for name in _SETTINGS}
        _tell_changes("run", {name: (state["settings"].get(name), value) for name, value in now.items()})

    def _check_shape(self, path: Path, state: Mapping[str, Any]) -> None:
        if len(state["members"]) != len(self.trainees):
            raise CheckpointError(
                f"{path} holds a population of {len(state['members'])}, this run has {len(self.trainees)} agents."
            )
        if (state["evolution"] is None) != (self.evolution is None):
            there, here = ("without", "with") if state["evolution"] is None else ("with", "without")
            raise CheckpointError(f"{path} was made {there} selection, this run is {here} it.")

    def _restore_member(self, trainee: Trainee, saved: Mapping[str, Any], path: Path) -> None:
        agent = trainee.agent
        is_evolving = self.evolution is not None and self.evolution.has_mutation
        before = _hyperparameters(agent)
        content = read_checkpoint(path, need_optimizer=False, need_tokenizer=False)
        stored = content.state.get("hyperparameters", {})
        _tell_changes(
            f"agent {agent.index}", _changed_settings(content.settings, plain(agent.settings.describe()), stored)
        )
        agent.load_checkpoint(str(path), load_optimizer=True, restore_config=False, restore_hyperparameters=is_evolving)
        trainee.load_state_dict(saved)
        searched = set(agent.hp_config.names()) if is_evolving else set()  # these moved by themselves: no news
        names = [name for name in stored if name in before and name not in searched]
        _tell_changes(f"agent {agent.index}", {name: (stored[name], before[name]) for name in names})


def _hyperparameters(agent: Any) -> dict[str, Any]:
    return dict(agent._state.hyperparameters)


def _changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], told_apart: Collection[str]) -> dict[str, Any]:
    """Settings of the agent that differ; what says where the model lies is not one."""
    changes: dict[str, Any] = {}
    for name in saved.keys() & now.keys() - set(told_apart) - {
        "model_name",
        "model_config",
        "hp_config",
        "fsdp_config",
    }:
        old, new = saved[name], now[name]
        if name == "lora_config" and (old is None or new is None):
            continue  # one of the two agents got its adapter with the model; loading compares the adapters themselves
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= {f"{name}.{key}": (old[key], new[key]) for key in old.keys() & new.keys()}
        else:
            changes[name] = (old, new)
    return dict(sorted(changes.items()))


def _tell_changes(what: str, changes: Mapping[str, Sequence[Any]]) -> None:
    for name, (old, new) in changes.items():
        if old != new:
            _logger.warning("Resumed with changed settings: %s %s %s -> %s", what, name, old, new)
