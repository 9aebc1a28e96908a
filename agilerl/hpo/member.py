"""What selection and mutation ask of an agent."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from agilerl.algorithms.core.hyperparameters import HyperparameterConfig
from agilerl.errors import ConfigError

__all__ = ["Member", "last_fitness"]


class Member(Protocol):
    """An agent that can live in a population.

    Each name of ``hp_config`` is an attribute that can be read and assigned; assigning one is enough to make it count.
    """

    index: int
    mut: str | None
    fitness: list[Any]

    @property
    def hp_config(self) -> HyperparameterConfig:
        """Hyper-parameters that may change."""
        ...

    def clone(self, index: int | None = None, wrap: bool = True) -> Any:
        """An independent copy: weights, moments, hyper-parameters and history."""
        ...

    def mutation_hook(self) -> None:
        """Run what was registered to follow a mutation."""
        ...

    def clean_up(self) -> None:
        """Let go of weights and moments; the agent is not used again."""
        ...


def last_fitness(agent: Member) -> float:
    """Return the fitness of the last evaluation, the mean of a row of several; higher is better.

    Raises:
        ConfigError: The agent was never evaluated.
    """
    if not len(agent.fitness):
        raise ConfigError(f"Agent {agent.index} has no fitness yet: evaluate it (agent.test(env)) before selection.")
    return float(np.mean(agent.fitness[-1]))
