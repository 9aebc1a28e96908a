"""The ``evolution`` section: a population that searches its own settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from agilerl.config.section import Section

__all__ = ["EvolutionSection", "RangeConfig"]

_MUTABLE = (
    "lr",
    "batch_size",
    "micro_batch_size_per_gpu",
    "mini_batch_size",
    "update_epochs",
    "max_grad_norm",
    "beta",
    "nll_alpha",
)


class RangeConfig(Section):
    """Bounds of one searched setting, and how far a mutation moves it."""

    min: float
    """Smallest value."""
    max: float
    """Largest value."""
    shrink_factor: float = Field(default=0.8, gt=0, lt=1)
    """Factor of a step down."""
    grow_factor: float = Field(default=1.2, gt=1)
    """Factor of a step up."""

    @model_validator(mode="after")
    def _ordered(self) -> RangeConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is larger than max {self.max:g}")
        return self


class EvolutionSection(Section):
    """Train several members on one shared base, keep the best and vary their settings."""

    other_names: ClassVar = {"size": "population_size", "population": "population_size", "interval": "evo_steps"}

    population_size: int = Field(default=1, ge=1)
    """Members; 1: no evolution. Each member gets the whole training budget."""
    generations: int | None = Field(default=None, ge=1)
    """How often the members are compared and replaced, spread over the run; instead of evo_steps."""
    evo_steps: int | None = Field(default=None, ge=1)
    """Updates of each member between two selections; nothing: from generations, else 10."""
    tournament_size: int = Field(default=2, ge=1)
    """Members drawn for each place in the next generation; the fittest of them takes it."""
    elitism: bool = True
    """The best member goes on unchanged."""
    mutate_elite: bool = False
    """Also mutate that best member."""
    mutation_probability: float = Field(default=0.7, ge=0, le=1)
    """Chance that a new member changes one searched setting."""
    ranges: dict[str, RangeConfig] = Field(default_factory=dict)
    """Searched settings, such as `lr: {min: 1e-5, max: 1e-3}`; empty: lr between a tenth and ten times its value."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of selection and mutation; nothing: training.seed."""

    @model_validator(mode="after")
    def _known_ranges(self) -> EvolutionSection:
        for name in self.ranges:
            if name not in _MUTABLE:
                raise ValueError(f"ranges.{name} cannot be searched; possible: {', '.join(_MUTABLE)}")
        if self.generations is not None and self.evo_steps is not None:
            raise ValueError("generations and evo_steps are both set; keep the one you mean")
        return self
