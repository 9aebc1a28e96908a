"""Tournament selection: some agents are drawn, the fittest of them goes on.

Deciding and doing are apart: ``choose`` looks at numbers only, so one rank can decide for all; ``select`` makes agents.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agilerl.errors import ConfigError, NonFiniteError
from agilerl.hpo.member import Member, last_fitness
from agilerl.hpo.rng import load_rng_state, make_rng, rng_state

__all__ = ["Selection", "TournamentSelection"]

_logger = logging.getLogger(__name__)

AnyMember = TypeVar("AnyMember", bound=Member)


@dataclass(frozen=True)
class Selection:
    """Who comes from whom: ``parents[k]`` is the present place of the parent of the next member k."""

    elite: int
    parents: tuple[int, ...]
    keeps_elite: bool
    """Whether member 0 of the next generation is the elite itself."""


class TournamentSelection:
    """Draw ``tournament_size`` members without replacement, keep the fittest; repeat for every place.

    Only the last fitness counts, higher is better, and a member whose fitness is NaN is never drawn. Equal fitness: the
    earlier member wins. Places, not ``index``, tell members apart, so indices may repeat.

    Args:
        tournament_size: Members per draw; capped at the number of candidates.
        elitism: Whether the fittest of all goes on as member 0 in any case.
        population_size: Members of the next generation.
        rand_seed: Seed of its own generator; global generators are never touched.

    Raises:
        ConfigError: A count is not a whole number of at least 1.
    """

    def __init__(self, tournament_size: int, elitism: bool, population_size: int, *, rand_seed: int = 42) -> None:
        for name, value in (("tournament_size", tournament_size), ("population_size", population_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if not isinstance(elitism, bool):
            raise ConfigError(f"elitism is True or False, got {elitism!r}.")
        if tournament_size > population_size:
            _logger.warning(
                "tournament_size %d is more than the population of %d: every draw holds all members, so the fittest is the "
                "parent of all.",
                tournament_size,
                population_size,
            )
        self.tournament_size = tournament_size
        self.elitism = elitism
        self.population_size = population_size
        self.rng = make_rng(rand_seed)

    def choose(self, fitnesses: Sequence[float]) -> Selection:
        """Decide from the last fitness of each member; draws from the generator.

        Raises:
            NonFiniteError: Every fitness is NaN.
        """
        candidates = [place for place, fitness in enumerate(fitnesses) if not math.isnan(fitness)]
        if not candidates:
            raise NonFiniteError(f"The fitness of all {len(fitnesses)} agents is NaN: there is nothing to select from.")
        elite = max(candidates, key=lambda place: fitnesses[place])
        parents = [elite] if self.elitism else []
        size = min(self.tournament_size, len(candidates))
        while len(parents) < self.population_size:
            drawn = self.rng.choice(len(candidates), size=size, replace=False)
            contestants = sorted(candidates[int(one)] for one in drawn)
            parents.append(max(contestants, key=lambda place: fitnesses[place]))
        return Selection(elite, tuple(parents), keeps_elite=self.elitism)

    def select(self, population: Sequence[AnyMember]) -> tuple[AnyMember, list[AnyMember]]:
        """Return the fittest member and the next generation, which consists of clones.

        The given agents are left as they are; call ``clean_up()`` on those no longer needed.

        Raises:
            ConfigError: The population is empty, or a member was never evaluated.
        """
        if not population:
            raise ConfigError("The population is empty: there is nothing to select from.")
        selection = self.choose([last_fitness(agent) for agent in population])
        elite = population[selection.elite]
        indices = next_indices(population, selection)
        return elite, [population[p].clone(index=i) for p, i in zip(selection.parents, indices, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state as plain data."""
        return {"rng": rng_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        load_rng_state(self.rng, state["rng"])


def next_indices(population: Sequence[Member], selection: Selection) -> list[int]:
    """Return the index of each next member: the elite keeps its own, every other member gets one not used yet."""
    fresh = max(int(agent.index) for agent in population) + 1
    indices: list[int] = []
    for place, parent in enumerate(selection.parents):
        if place == 0 and selection.keeps_elite:
            indices.append(int(population[parent].index))
        else:
            indices.append(fresh)
            fresh += 1
    return indices
