"""What an agent remembers about itself: scores, fitness and rows seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["AgentRecord"]

Fitness = float | np.ndarray
Score = float | list[float]


@dataclass
class AgentRecord:
    """History of one agent. ``steps`` counts dataset rows over all ranks."""

    scores: list[Score] = field(default_factory=list)
    fitness: list[Fitness] = field(default_factory=list)
    steps: int = 0
    rows_per_s: float = 0.0
    """Speed of the last closed training block."""
    _opened: float | None = field(default=None, repr=False, compare=False)

    def add_scores(self, scores: Sequence[float | Sequence[float]]) -> None:
        """Append ``scores``, each a number or a list of numbers."""
        for score in scores:
            self.scores.append([float(one) for one in score] if isinstance(score, Sequence) else float(score))

    def open(self) -> None:
        """Start a training block; a block left open is closed without rows."""
        self._opened = time.perf_counter()

    def close(self, num_steps: int) -> None:
        """End a training block in which ``num_steps`` rows were trained."""
        if num_steps < 0:
            raise ValueError(f"num_steps is {num_steps}; a training block has zero or more rows.")
        if self._opened is not None and num_steps:
            self.rows_per_s = num_steps / max(time.perf_counter() - self._opened, 1e-9)
        self._opened = None
        self.steps += int(num_steps)

    def copy(self) -> AgentRecord:
        """An independent copy; an open training block stays with the original."""
        record = AgentRecord(rows_per_s=self.rows_per_s)
        record.load_state_dict(self.state_dict())
        return record

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "scores": [list(score) if isinstance(score, list) else score for score in self.scores],
            "fitness": [value.tolist() if isinstance(value, np.ndarray) else float(value) for value in self.fitness],
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the history by a saved one."""
        self.scores = [list(score) if isinstance(score, list) else float(score) for score in state["scores"]]
        self.fitness = [np.asarray(value) if isinstance(value, list) else float(value) for value in state["fitness"]]
        self.steps = int(state["steps"])
