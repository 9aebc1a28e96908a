"""One generation after the other: measured members are selected, cloned and mutated.

All ranks draw from generators that rank 0 has seeded, on fitnesses that are the same everywhere, so populations never
drift apart. The first member that goes on from a parent *is* the parent; only further ones are clones: a full fine-tune
never needs room for two populations at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.tournament import TournamentSelection, next_indices
from agilerl.training.llm.lineage import write_lineage
from agilerl.training.llm.trainee import Trainee

__all__ = ["Evolution"]

_logger = logging.getLogger(__name__)


class Evolution:
    """Selection and mutation of a population in training.

    Args:
        selection: Decides who goes on: a ``TournamentSelection``, or anything with its ``select``.
        mutation: ``Mutations``, or anything with its ``mutation``; None changes nothing.
        interval: Iterations between two generations.
        log: Takes an event record per generation.
        lineage_path: Where the lineage goes on the main rank; None keeps it in memory only.
    """

    def __init__(
        self,
        selection: Any,
        mutation: Any,
        interval: int,
        log: Callable[[Mapping[str, Any]], None],
        lineage_path: Path | None,
    ) -> None:
        self.generation = 0
        self.lineage: list[dict[str, Any]] = []
        self._selection = selection
        self._mutation = mutation
        self._interval = interval
        self._log = log
        self._lineage_path = lineage_path
        if hasattr(mutation, "check_language_model"):
            mutation.check_language_model()

    @property
    def has_mutation(self) -> bool:
        """Whether hyper-parameters move during the run, so that a resumed one takes the checkpoint's values."""
        return self._mutation is not None

    def is_due(self, iteration: int) -> bool:
        """Return whether a new generation follows this iteration."""
        return iteration % self._interval == 0

    def begin(self, trainees: Sequence[Trainee], *, mutate: bool = False) -> None:
        """Make all ranks draw alike, vary the members if asked to, and record what the run starts with."""
        runtime = trainees[0].agent.runtime
        for part in (self._selection, self._mutation):
            if hasattr(part, "state_dict"):
                part.load_state_dict(runtime.broadcast(part.state_dict()))
        changes = self._mutate(trainees, pre_training_mut=True) if mutate else [None] * len(trainees)
        for place, (trainee, change) in enumerate(zip(trainees, changes, strict=True)):
            self._record(place, trainee, mutation=change)
        self._write(trainees)

    def advance(self, trainees: Sequence[Trainee], iteration: int) -> list[Trainee]:
        """Return the next generation. Every member must have been measured with the weights it has now."""
        self._reopen()
        before = [(int(trainee.agent.index), trainee.fitness) for trainee in trainees]
        following, parents, elite = self._descend(trainees)
        changes = self._mutate(following)
        self.generation += 1
        for place, (trainee, change) in enumerate(zip(following, changes, strict=True)):
            parent = parents[place]
            index, fitness = before[parent]
            is_elite = place == 0 and parent == elite
            self._record(place, trainee, parent_place=parent, parent=index, fitness=fitness, is_elite=is_elite,
                         mutation=change)  # fmt: skip
        self._write(following)
        moves = [f"{change['name']} {change['old']:.4g} -> {change['new']:.4g}" for change in changes if change]
        best = max(fitness for _, fitness in before if fitness == fitness)
        self._log(
            {
                "kind": "event",
                "iteration": iteration,
                "rows": max(trainee.rows for trainee in following),
                "fitness": best,
                "message": f"generation {self.generation}: best held-out fitness {best:.4f}, "
                f"{len(set(parents))} of {len(before)} members go on, mutations: {', '.join(moves) or 'none'}",
            }
        )
        return following

    def end(self, trainees: Sequence[Trainee], best: Trainee) -> None:
        """Record the final measure of every member."""
        self._reopen()
        for place, trainee in enumerate(trainees):
            self._record(
                place,
                trainee,
                parent_place=place,
                parent=int(trainee.agent.index),
                fitness=trainee.fitness,
                is_elite=trainee is best,
                final=True,
            )
        self._write(trainees)

    def state_dict(self) -> dict[str, Any]:
        """Return the generation, the lineage and the generators, as plain data."""
        parts = {"selection": self._selection, "mutation": self._mutation}
        return {
            "generation": self.generation,
            "lineage": [dict(row) for row in self.lineage],
            "has_mutation": self.has_mutation,
            **{name: part.state_dict() if hasattr(part, "state_dict") else None for name, part in parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            CheckpointError: It was made with mutation and this run has none, or the other way round.
        """
        if state["has_mutation"] != self.has_mutation:
            there, here = ("with", "without") if state["has_mutation"] else ("without", "with")
            raise CheckpointError(f"The checkpoint was made {there} mutation, this run is {here} it.")
        self.generation = int(state["generation"])
        self.lineage = [dict(row) for row in state["lineage"]]
        for name, part in (("selection", self._selection), ("mutation", self._mutation)):
            if hasattr(part, "load_state_dict") and state[name] is not None:
                part.load_state_dict(state[name])

    def _reopen(self) -> None:
        """Take the closing rows off: a finished run that is resumed with a larger budget goes on."""
        self.lineage = [row for row in self.lineage if not row.get("final")]

    def _record(self, place: int, trainee: Trainee, **origin: Any) -> None:
        agent = trainee.agent
        row: dict[str, Any] = {
            "generation": self.generation,
            "place": place,
            "agent": int(agent.index),
            "parent_place": None,
            "parent": None,
            "rows": trainee.rows,
            "fitness": None,
            "is_elite": False,
            "mutation": None,
            "hyperparameters": _hyperparameters(agent),
        }
        self.lineage.append(row | origin)

    def _write(self, trainees: Sequence[Trainee]) -> None:
        if self._lineage_path is not None and trainees[0].agent.runtime.is_main:
            write_lineage(self._lineage_path, self.lineage)

    def _mutate(self, trainees: Sequence[Trainee], **kwargs: Any) -> list[dict[str, Any] | None]:
        """Mutate in place and return what changed for each member, seen from outside."""
        if self._mutation is None:
            return [None] * len(trainees)
        agents = [trainee.agent for trainee in trainees]
        before = [_hyperparameters(agent) for agent in agents]
        if any(new is not old for new, old in zip(self._mutation.mutation(agents, **kwargs), agents, strict=True)):
            raise ConfigError("mutation must change agents in place and return the same ones, in order.")
        changes: list[dict[str, Any] | None] = []
        for agent, old in zip(agents, before, strict=True):
            moved = [(name, old[name], new) for name, new in _hyperparameters(agent).items() if new != old[name]]
            changes.append(dict(zip(("name", "old", "new"), moved[0], strict=True)) if moved else None)
        return changes

    def _descend(self, trainees: Sequence[Trainee]) -> tuple[list[Trainee], list[int], int | None]:
        """Return the next members, the place of each one's parent, and the place of the elite."""
        if getattr(self._selection.select, "__func__", None) is not TournamentSelection.select:
            return self._descend_by_select(trainees)
        chosen = self._selection.choose([trainee.fitness for trainee in trainees])
        indices = next_indices([trainee.agent for trainee in trainees], chosen)
        for place, trainee in enumerate(trainees):
            if place not in chosen.parents:
                trainee.close()
                trainee.agent.clean_up()
        following: list[Trainee] = []
        for n, (place, index) in enumerate(zip(chosen.parents, indices, strict=True)):
            goes_on = place not in chosen.parents[:n]
            following.append(trainees[place] if goes_on else trainees[place].clone(index))
        for trainee, index in zip(following, indices, strict=True):
            trainee.agent.index = index
        return following, list(chosen.parents), chosen.elite

    def _descend_by_select(self, trainees: Sequence[Trainee]) -> tuple[list[Trainee], list[int], int | None]:
        """Let a user's own strategy make the agents, and find out from their history whom each one comes from."""
        agents = [trainee.agent for trainee in trainees]
        elite, population, *_ = self._selection.select(agents)
        if len(population) != len(agents):
            raise ConfigError(f"selection returned {len(population)} agents for a population of {len(agents)}.")
        parents = [_parent_of(agent, agents) for agent in population]
        following: list[Trainee] = []
        for agent, parent in zip(population, parents, strict=True):
            following.append(trainees[parent] if agent is agents[parent] else trainees[parent].adopt(agent))
        for trainee in trainees:
            if trainee not in following:
                trainee.close()
                trainee.agent.clean_up()
        return following, parents, _parent_of(elite, agents)


def _hyperparameters(agent: Any) -> dict[str, Any]:
    return {name: getattr(agent, name) for name in agent.hp_config.names()}


def _parent_of(agent: Any, parents: Sequence[Any]) -> int:
    """Return the place of the agent itself, else of the one whose history it has."""
    for place, parent in enumerate(parents):
        if agent is parent:
            return place
    for place, parent in enumerate(parents):
        if list(agent.fitness) == list(parent.fitness) and agent.steps == parent.steps:
            return place
    raise ConfigError(f"selection returned agent {agent.index}, which is no clone of a member of the population.")
