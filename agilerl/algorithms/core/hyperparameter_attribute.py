"""A mutable hyper-parameter as an attribute: read from the agent's state, checked when it is assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agilerl.errors import ConfigError

__all__ = ["HyperparameterAttribute"]


class HyperparameterAttribute:
    """Descriptor over ``agent._state.hyperparameters``; the next ``learn`` call uses what is assigned.

    Args:
        problem: Gives a sentence about a value that cannot be used, else None.
        effective: Attribute of the agent's batch plan to read instead of the raw value: sizes are clamped to what
            there is.
    """

    def __init__(self, problem: Callable[[str, Any], str | None], *, effective: bool = False) -> None:
        self._problem = problem
        self._effective = effective

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        if agent is None:
            return self
        return getattr(agent.batch_plan, self._name) if self._effective else agent._state.hyperparameters[self._name]

    def __set__(self, agent: Any, value: Any) -> None:
        problem = self._problem(self._name, value)
        if problem:
            raise ConfigError(problem + ".")
        values = agent._state.hyperparameters
        before = values.get(self._name)
        values[self._name] = value
        try:
            agent._hyperparameters_changed()
        except ConfigError:
            values[self._name] = before
            raise
