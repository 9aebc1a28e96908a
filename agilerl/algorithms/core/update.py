"""From rows to updated weights: the one path that every training call takes.

An `Objective` says what a row weighs, how rows become micro-batches and what they cost; this module strings forward,
backward, reduction, clipping and the optimizer step together. The loss is divided once, by what all ranks' rows of the
optimizer step weigh together, so that neither micro-batch size, padding nor rank count can change the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from agilerl.algorithms.core.plan import BatchPlan
from agilerl.distributed import Runtime
from agilerl.errors import DataError, ModelError, NonFiniteError
from agilerl.metrics import PhaseTimer
from agilerl.optim import OptimizerWrapper, clip_gradients

__all__ = ["Objective", "Sums", "Updater"]

logger = logging.getLogger(__name__)

Row = TypeVar("Row", contravariant=True)


@dataclass
class Sums:
    """Totals over rows, to be divided by the totals of their units: exact means whatever the grouping."""

    totals: dict[str, float] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)

    def add(self, totals: Mapping[str, float], units: Mapping[str, float]) -> None:
        """Add the totals of further rows."""
        for mine, theirs in ((self.totals, totals), (self.units, units)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + float(value)

    def mean(self, name: str, unit: str) -> float:
        """Total ``name`` per ``unit``."""
        return self.totals[name] / self.units[unit]


class Objective(Protocol[Row]):
    """What is minimised. Methods see rows and the model, never the agent."""

    def units(self, rows: Sequence[Row]) -> dict[str, float]:
        """Denominators that these rows contribute, by unit ("tokens", "pairs"); plain counts may be among them."""
        ...

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Real tokens of each row, for sharing rows out among micro-batches."""
        ...

    def plan(self, lengths: Sequence[int], max_rows: int | None) -> list[list[int]]:
        """Row indices of each micro-batch."""
        ...

    def collate(self, rows: Sequence[Row], device: torch.device) -> Any:
        """One micro-batch; no rows give a valid one that weighs nothing."""
        ...

    def prepare(self, rows: Sequence[Row], micros: Sequence[Sequence[int]], runtime: Runtime) -> None:
        """Compute what the loss of these micro-batches needs beforehand, on all ranks alike."""
        ...

    def running(self, model: nn.Module, micro: Any) -> AbstractContextManager[object]:
        """What surrounds forward and backward of a micro-batch."""
        ...

    def loss(self, model: nn.Module, micro: Any, units: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Contribution to the loss, divided by the global ``units``, and detached totals to report."""
        ...

    def required(self) -> str:
        """The unit without which there is nothing to train."""
        ...


@dataclass
class Updater(Generic[Row]):
    """Runs an objective over rows. Holds the resources of one agent and none of its identity."""

    objective: Objective[Row]
    model: nn.Module
    runtime: Runtime
    offload: Callable[[], AbstractContextManager[object]]
    _has_checked_gradients: bool = False

    def train(
        self,
        rows: Sequence[Row],
        plan: BatchPlan,
        optimizer: OptimizerWrapper,
        *,
        epochs: int,
        max_grad_norm: float | None,
        timer: PhaseTimer,
    ) -> tuple[Sums, float]:
        """Make ceil(rows / mini-batch) optimizer steps per epoch; leaves nothing pending.

        Returns:
            Totals over all steps, each at the weights before its step, and the last gradient norm before clipping.

        Raises:
            NonFiniteError: A loss or gradient is not finite, on any rank; that step changed no weight.
            DataError: No row of a step has a trained token.
        """
        sums, norm = Sums(), math.nan
        size = plan.mini_batch_size
        num_steps = int(self.runtime.max([plan.num_optimizer_steps(len(rows))])[0])
        if num_steps == 0:
            raise DataError("learn was given a batch without rows.")
        for _ in range(epochs):
            for step in range(num_steps):
                chunk = rows[step * size : (step + 1) * size]
                norm = self._step(chunk, plan.micro_batch_size_per_gpu, optimizer, max_grad_norm, sums, timer)
        return sums, norm

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], max_rows: int | None) -> Sums:
        """Totals over this rank's and all other ranks' rows, without gradients."""
        sums = Sums()
        micros, units = self._micro_batches(rows, max_rows)
        totals: dict[str, Tensor] = {}
        self.objective.prepare(rows, micros, self.runtime)
        for indices in micros:
            micro = self.objective.collate([rows[i] for i in indices], self.runtime.device)
            with self.runtime.running(self.model), self.objective.running(self.model, micro):
                _, parts = self.objective.loss(self.model, micro, dict.fromkeys(units, 1.0))
            _accumulate(totals, parts)
        sums.add(self._reduced(totals), units)
        return sums

    def _step(
        self,
        rows: Sequence[Row],
        max_rows: int | None,
        optimizer: OptimizerWrapper,
        max_grad_norm: float | None,
        sums: Sums,
        timer: PhaseTimer,
    ) -> float:
        with timer.phase("prepare"):
            micros, units = self._micro_batches(rows, max_rows)
            optimizer.zero_grad()
        required = self.objective.required()
        if not units[required] > 0:
            raise DataError(
                f"No {required} to train on in this batch of {len(rows)} rows: every weight is zero. "
                "Check the prompt lengths, the response weights and the length limit."
            )
        with timer.phase("forward"):
            self.objective.prepare(rows, micros, self.runtime)
        totals: dict[str, Tensor] = {}
        for number, indices in enumerate(micros):
            with timer.phase("prepare"):
                micro = self.objective.collate([rows[i] for i in indices], self.runtime.device)
            is_last = number == len(micros) - 1
            with self.runtime.micro_step(self.model, is_last=is_last), self.objective.running(self.model, micro):
                with timer.phase("forward"), self.offload():
                    loss, parts = self.objective.loss(self.model, micro, units)
                with timer.phase("backward"):
                    loss.backward()
            _accumulate(totals, parts)
            del loss, parts, micro
        parameters = optimizer.parameters
        with timer.phase("grad_sync"):
            self._complete(parameters)
            self.runtime.reduce_gradients(parameters)
            norm = float(self.runtime.grad_norm(parameters))
            reduced = self._reduced(totals)
        bad = [name for name, value in reduced.items() if not math.isfinite(value)]
        if bad or not math.isfinite(norm):
            optimizer.zero_grad()
            what = f"the {bad[0].replace('_', ' ')}" if bad else "the gradient norm"
            value = reduced[bad[0]] if bad else norm
            raise NonFiniteError(
                f"Non-finite training step: {what} is {value}. No weight was changed. Look for a too high learning rate, "
                "a damaged checkpoint or an overflow in a low-precision model."
            )
        with timer.phase("optim"):
            clip_gradients(parameters, norm, max_grad_norm)
            optimizer.step()
        sums.add(reduced, units)
        return norm

    def _micro_batches(self, rows: Sequence[Row], max_rows: int | None) -> tuple[list[list[int]], dict[str, float]]:
        """Row indices of each micro-batch, equally many on every rank, and the units of all ranks' rows."""
        local = self.objective.units(rows)
        names = sorted(local)
        reduced = self.runtime.sum([local[name] for name in names])
        micros = self.objective.plan(self.objective.lengths(rows), max_rows) if rows else []
        count = int(self.runtime.max([len(micros)])[0])
        return micros + [[] for _ in range(count - len(micros))], dict(zip(names, reduced, strict=True))

    def _reduced(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        names = sorted(totals)
        values = torch.stack([totals[name].double() for name in names]).tolist() if names else []
        return dict(zip(names, self.runtime.sum(values), strict=True))

    def _complete(self, parameters: Sequence[Tensor]) -> None:
        """Give every parameter a gradient; tell once which ones the loss never reached."""
        missing = [p for p in parameters if p.grad is None]
        if missing and not self._has_checked_gradients:
            if self.runtime.sum([len(parameters) - len(missing)])[0] == 0:
                raise ModelError("The loss reached no trainable parameter: nothing would be trained.")
            names = {id(p): name for name, p in self.model.named_parameters()}
            logger.warning(
                "%d trainable tensors got no gradient in the first step, for instance %s.",
                len(missing),
                names.get(id(missing[0]), "one outside of the model"),
            )
        self._has_checked_gradients = True
        for p in missing:
            p.grad = torch.zeros_like(p)


def _accumulate(totals: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    for name, value in parts.items():
        totals[name] = totals[name] + value if name in totals else value
