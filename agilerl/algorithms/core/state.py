"""The mutable state of an agent: everything that a checkpoint keeps besides weights and moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agilerl.metrics import AgentRecord

__all__ = ["AgentState", "random_stream"]


@dataclass
class AgentState:
    """What changes while an agent lives.

    Attributes:
        index: Place in the population.
        hyperparameters: Current values of the settings that a user or a mutation may change.
        record: Scores, fitness and rows seen.
        mut: Last mutation, in words.
        learn_calls: Training calls so far; with the seed they determine every random draw of the next one.
        schedule_step: Steps that the learning-rate schedule has taken.
        reference_update_tracker: Reference refreshes asked for so far.
        extras: Attributes that a user or a subclass added.
    """

    index: int = 0
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    record: AgentRecord = field(default_factory=AgentRecord)
    mut: str | None = None
    learn_calls: int = 0
    schedule_step: int = 0
    reference_update_tracker: int = 0
    extras: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> AgentState:
        """An independent copy."""
        duplicate = copy.copy(self)
        duplicate.hyperparameters = dict(self.hyperparameters)
        duplicate.record = self.record.copy()
        duplicate.extras = copy.deepcopy(self.extras)
        return duplicate

    def describe(self) -> dict[str, Any]:
        """Plain values, for checkpoints; extras that are not plain data or tensors stay out."""
        return {
            "index": self.index,
            "hyperparameters": dict(self.hyperparameters),
            "record": self.record.state_dict(),
            "mut": self.mut,
            "learn_calls": self.learn_calls,
            "schedule_step": self.schedule_step,
            "reference_update_tracker": self.reference_update_tracker,
            "extras": {name: value for name, value in self.extras.items() if _is_plain(value)},
        }

    def restore(self, saved: dict[str, Any], *, hyperparameters: bool, index: bool) -> None:
        """Take over saved values; own hyper-parameters and index stay where asked."""
        if index:
            self.index = int(saved["index"])
        if hyperparameters:
            self.hyperparameters.update(saved["hyperparameters"])
        self.record.load_state_dict(saved["record"])
        self.mut = saved["mut"]
        self.learn_calls = int(saved["learn_calls"])
        self.schedule_step = int(saved["schedule_step"])
        self.reference_update_tracker = int(saved["reference_update_tracker"])
        self.extras.update(saved["extras"])


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


@contextmanager
def random_stream(device: torch.device, *key: int) -> Iterator[None]:
    """Draw from a stream that is a pure function of ``key``; the global generators are as before afterwards.

    A training call that derives its stream from (seed, call number, rank) needs no generator state in a checkpoint: the
    same call always draws the same dropout masks, after a resume too.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    seed = int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.default_generators[devices[0]].manual_seed(seed)
        yield
