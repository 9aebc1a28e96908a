"""Agents without a model: what selection and mutation see of one."""

from __future__ import annotations

import copy
from typing import Any

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter


class FakeAgent:
    def __init__(self, index: int = 0, fitness: float | None = None, **values: Any) -> None:
        self.index = index
        self.mut: str | None = None
        self.fitness = [] if fitness is None else [fitness]
        self.steps = 0
        self.lr, self.batch_size, self.mini_batch_size = 1e-3, 16, None
        self.hooks_run = 0
        self.cleaned = False
        self.hp_config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-1), batch_size=RLParameter(1, 64, dtype=int))
        for name, value in values.items():
            setattr(self, name, value)

    def clone(self, index: int | None = None, wrap: bool = True) -> FakeAgent:
        duplicate = copy.deepcopy(self)
        duplicate.index = self.index if index is None else index
        return duplicate

    def mutation_hook(self) -> None:
        self.hooks_run += 1

    def clean_up(self) -> None:
        self.cleaned = True
