"""Mutable hyper-parameters: the range of one, and the set of those that an agent may change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from agilerl.errors import ConfigError

__all__ = ["HyperparameterConfig", "RLParameter", "make_default_hp_config"]

Number = float | int


class RLParameter:
    """The range in which one hyper-parameter may move, and how far one mutation moves it.

    A mutation multiplies by ``shrink_factor`` or ``grow_factor`` (even odds) and clamps to ``[min, max]``. A value that
    stands at the bound it would be pushed against goes the other way, so that a mutation is never spent on nothing; an
    integer always moves by at least 1. Only an empty range (``min == max``) stays where it is.

    Args:
        min: Smallest value, inclusive.
        max: Largest value, inclusive.
        shrink_factor: Multiplier of a downward move, between 0 and 1.
        grow_factor: Multiplier of an upward move, above 1.
        dtype: ``float`` or ``int``.

    Raises:
        ConfigError: The range is empty, not finite, or a factor points the wrong way.
    """

    def __init__(
        self,
        min: Number,
        max: Number,
        shrink_factor: float = 0.8,
        grow_factor: float = 1.2,
        dtype: type[float] | type[int] = float,
    ) -> None:
        if dtype not in (float, int):
            raise ConfigError(f"dtype of a hyper-parameter is float or int, got {dtype!r}.")
        for label, bound in (("min", min), ("max", max)):
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not math.isfinite(bound):
                raise ConfigError(f"{label} of a hyper-parameter must be a finite number, got {bound!r}.")
            if dtype is int and bound != int(bound):
                raise ConfigError(f"{label} of an int hyper-parameter must be whole, got {bound!r}.")
        if min > max:
            raise ConfigError(f"min ({min!r}) of a hyper-parameter is above its max ({max!r}); swap them.")
        if not 0.0 < shrink_factor < 1.0:
            raise ConfigError(f"shrink_factor must lie between 0 and 1, got {shrink_factor!r}.")
        if not (grow_factor > 1.0 and math.isfinite(grow_factor)):
            raise ConfigError(f"grow_factor must be a finite number above 1, got {grow_factor!r}.")
        self.min: Number = dtype(min)
        self.max: Number = dtype(max)
        self.shrink_factor = float(shrink_factor)
        self.grow_factor = float(grow_factor)
        self.dtype = dtype
        self.value: Number | None = None
        """The value of the last mutation, or what the user set; an agent's own value counts where there is one."""

    def clamp(self, value: Number) -> Number:
        """Return ``value`` as ``dtype`` inside the bounds."""
        rounded = round(value) if self.dtype is int else float(value)
        return self.dtype(min(max(rounded, self.min), self.max))

    def moved(self, value: Number, *, grow: bool, step: int = 1) -> Number:
        """Return ``value`` moved once up or down, in bounds; the other way where a bound leaves no room.

        Args:
            value: Where the move starts; a value outside the bounds is brought inside first.
            grow: Direction.
            step: An int result is a multiple of this where the range holds one (for a batch size, the number of ranks
                that share it).
        """
        start = self.clamp(value)
        for upward in (grow, not grow):
            target = self._towards(start, upward, step)
            if target != start:
                return target
        return start

    def mutate(self, value: Number | None = None, rng: np.random.Generator | None = None) -> Number:
        """Move once in a random direction, store the result in ``value`` and return it.

        Args:
            value: Where the move starts; defaults to the stored ``value``.
            rng: Source of the direction; a fresh one when left out.

        Raises:
            ConfigError: Neither ``value`` is known.
        """
        start = self.value if value is None else value
        if start is None:
            raise ConfigError("The hyper-parameter has no value yet: set .value or pass one to mutate().")
        rng = np.random.default_rng() if rng is None else rng
        self.value = self.moved(start, grow=bool(rng.random() < 0.5))
        return self.value

    def to_dict(self) -> dict[str, Any]:
        """Return the range as plain values, for checkpoints; ``from_dict`` reads it."""
        return {
            "min": self.min,
            "max": self.max,
            "shrink_factor": self.shrink_factor,
            "grow_factor": self.grow_factor,
            "dtype": self.dtype.__name__,
            "value": self.value,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RLParameter:
        """Rebuild what ``to_dict`` wrote."""
        fields = dict(state)
        value = fields.pop("value", None)
        fields["dtype"] = {"float": float, "int": int}[fields["dtype"]]
        parameter = cls(**fields)
        parameter.value = value
        return parameter

    def _towards(self, start: Number, upward: bool, step: int) -> Number:
        target = start * (self.grow_factor if upward else self.shrink_factor)
        # Multiplying a negative (or zero) value may point the wrong way: the move is by size, the direction is ours.
        target = start + abs(target - start) * (1 if upward else -1)
        if self.dtype is float:
            return self.clamp(target)
        steps = max(1, round(abs(target - start) / step))
        first = -(-start // step) if not upward else start // step  # the multiple next to start, on its near side
        moved = int(first + (steps if upward else -steps)) * step
        lowest, highest = -(-int(self.min) // step) * step, int(self.max) // step * step
        return start if lowest > highest else min(max(moved, lowest), highest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RLParameter) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in self.to_dict().items() if k not in ("dtype", "value"))
        return f"RLParameter({fields}, dtype={self.dtype.__name__})"


class HyperparameterConfig:
    """The hyper-parameters that evolution may change, by attribute name: ``HyperparameterConfig(lr=RLParameter(...))``.

    Attribute and item access give the ``RLParameter``; an empty one is falsy.

    Raises:
        ConfigError: A value is not an ``RLParameter``.
    """

    def __init__(self, **parameters: RLParameter) -> None:
        for name, parameter in parameters.items():
            if not isinstance(parameter, RLParameter):
                raise ConfigError(f"Hyper-parameter '{name}' must be an RLParameter, got {type(parameter).__name__}.")
        self._parameters = dict(parameters)

    def names(self) -> list[str]:
        """Return the names, in the order they were given."""
        return list(self._parameters)

    def items(self) -> list[tuple[str, RLParameter]]:
        """Return (name, range) pairs, in the order they were given."""
        return list(self._parameters.items())

    def sample(self, rng: np.random.Generator | None = None) -> tuple[str, RLParameter]:
        """Return one (name, range) pair, each equally likely.

        Args:
            rng: Source of the choice; a fresh one when left out.

        Raises:
            ConfigError: There is nothing to choose from.
        """
        if not self._parameters:
            raise ConfigError("No mutable hyper-parameters: pass HyperparameterConfig(lr=RLParameter(...)).")
        rng = np.random.default_rng() if rng is None else rng
        return self.items()[int(rng.integers(len(self._parameters)))]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all ranges as plain values, for checkpoints; ``from_dict`` reads it."""
        return {name: parameter.to_dict() for name, parameter in self.items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Mapping[str, Any]]) -> HyperparameterConfig:
        """Rebuild what ``to_dict`` wrote."""
        return cls(**{name: RLParameter.from_dict(fields) for name, fields in state.items()})

    def __getattr__(self, name: str) -> RLParameter:
        # Guarded because copy and pickle ask for attributes before __init__ has run.
        parameters = self.__dict__.get("_parameters", {})
        if name in parameters:
            return parameters[name]
        known = ", ".join(parameters) or "none"
        raise AttributeError(f"No mutable hyper-parameter '{name}'; there are: {known}.")

    def __getitem__(self, name: str) -> RLParameter:
        if name in self._parameters:
            return self._parameters[name]
        known = ", ".join(self._parameters) or "none"
        raise KeyError(f"No mutable hyper-parameter '{name}'; there are: {known}.")

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HyperparameterConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HyperparameterConfig({', '.join(f'{name}={parameter!r}' for name, parameter in self.items())})"


def make_default_hp_config(**values: Number) -> HyperparameterConfig:
    """Return ranges around present values: a float v gets [v/10, 10v], an int v gets [max(1, v//4), 4v].

    Integers move by the factors 0.75 and 1.5, floats by the defaults of ``RLParameter``.

    Raises:
        ConfigError: A value is not a positive finite number.
    """
    parameters: dict[str, RLParameter] = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise ConfigError(f"'{name}' needs a positive finite number to build a range around, got {value!r}.")
        if isinstance(value, int):
            bounds = max(1, value // 4), 4 * value
            parameters[name] = RLParameter(*bounds, shrink_factor=0.75, grow_factor=1.5, dtype=int)
        else:
            parameters[name] = RLParameter(value / 10, 10 * value)
        parameters[name].value = value
    return HyperparameterConfig(**parameters)
