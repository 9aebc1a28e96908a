"""From rows to updated weights: the one path that every training call takes.

An `Objective` says what a row weighs, how rows become micro-batches and what they cost; this module strings forward,
backward, reduction, clipping and the optimizer step together. The loss is divided once, by what all ranks' rows of the
optimizer step weigh together, so that neither micro-batch size, padding nor rank count can change the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from agilerl.algorithms.core.plan import BatchPlan
from agilerl.algorithms.core.schedule import Schedule
from agilerl.distributed import Runtime
from agilerl.errors import DataError, ModelError, NonFiniteError
from agilerl.metrics import PhaseTimer
from agilerl.models.modules import has_hooks
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

    def plan_lanes(
        self, lengths: Sequence[int], max_rows: int | None
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Smaller micro-batches to compute side by side and, by lane, their numbers; None where that does not pay."""
        ...

    def collate(self, rows: Sequence[Row], device: torch.device) -> Any:
        """One micro-batch; no rows give a valid one that weighs nothing."""
        ...

    def prepare(self, rows: Sequence[Row], schedule: Schedule, runtime: Runtime) -> None:
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
        schedule, units = self._schedule(rows, max_rows)
        self.objective.prepare(rows, schedule, self.runtime)

        def compute(indices: Sequence[int]) -> dict[str, Tensor]:
            micro = self.objective.collate([rows[i] for i in indices], self.runtime.device)
            with self.runtime.running(self.model), self.objective.running(self.model, micro):
                return self.objective.loss(self.model, micro, dict.fromkeys(units, 1.0))[1]

        sums.add(self._reduced(_totals(schedule.each(compute))), units)
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
            parameters = optimizer.parameters
            schedule, units = self._schedule(rows, max_rows, parameters)
            optimizer.zero_grad()
        required = self.objective.required()
        if not units[required] > 0:
            raise DataError(
                f"No {required} to train on in this batch of {len(rows)} rows: every weight is zero. "
                "Check the prompt lengths, the response weights and the length limit."
            )
        with timer.phase("forward"):
            self.objective.prepare(rows, schedule, self.runtime)
        compute = partial(self._gradients, rows, schedule, units)
        if len(schedule.lanes) == 1:
            (parts,) = schedule.by_lane(lambda numbers: compute(numbers, Tensor.backward, timer))
        else:
            parts = _in_lanes(compute, schedule, parameters, timer)
        with timer.phase("grad_sync"):
            self._complete(parameters)
            self.runtime.reduce_gradients(parameters)
            norm = float(self.runtime.grad_norm(parameters))
            reduced = self._reduced(_totals([parts[number] for number in sorted(parts)]))
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

    def _gradients(
        self,
        rows: Sequence[Row],
        schedule: Schedule,
        units: Mapping[str, float],
        numbers: Sequence[int],
        backward: Callable[[Tensor], None],
        timer: PhaseTimer,
    ) -> dict[int, dict[str, Tensor]]:
        """Forward and backward pass of the numbered micro-batches, one after the other; what each reports."""
        reported: dict[int, dict[str, Tensor]] = {}
        for number in numbers:
            with timer.phase("prepare"):
                micro = self.objective.collate([rows[i] for i in schedule.micros[number]], self.runtime.device)
            is_last = number == len(schedule.micros) - 1
            with self.runtime.micro_step(self.model, is_last=is_last), self.objective.running(self.model, micro):
                with timer.phase("forward"), self.offload():
                    loss, reported[number] = self.objective.loss(self.model, micro, units)
                with timer.phase("backward"):
                    backward(loss)
            del loss, micro
        return reported

    def _schedule(
        self, rows: Sequence[Row], max_rows: int | None, parameters: Sequence[Tensor] = ()
    ) -> tuple[Schedule, dict[str, float]]:
        """The micro-batches, equally many on every rank, and the units of all ranks' rows; parameters get gradients."""
        local = self.objective.units(rows)
        names = sorted(local)
        units = dict(zip(names, self.runtime.sum([local[name] for name in names]), strict=True))
        lengths = self.objective.lengths(rows)
        planned = self.objective.plan_lanes(lengths, max_rows)
        if planned is not None and self._can_use_lanes(parameters):
            return Schedule(*planned), units
        micros = self.objective.plan(lengths, max_rows) if rows else []
        count = int(self.runtime.max([len(micros)])[0])
        return Schedule.in_turn(micros + [[] for _ in range(count - len(micros))]), units

    def _can_use_lanes(self, parameters: Sequence[Tensor]) -> bool:
        """Whether there are threads, nothing that others set on model or thread would miss lanes, and gradients are small."""
        trained = sum(p.numel() for p in parameters)
        hooked = any(has_hooks(module) for module in self.model.modules())
        watched = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
        if torch.get_num_threads() == 1 or hooked or watched or torch.is_autocast_enabled("cpu"):
            return False
        return trained * 8 <= sum(p.numel() for p in self.model.parameters())

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


def _totals(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for each in parts:
        for name, value in each.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


class _GradientSum:
    """Gradients that one lane adds up, beside the parameters instead of in them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.values: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        self.join(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def join(self, values: Sequence[Tensor | None]) -> None:
        """Add gradients; never in place, because one array may be the gradient of two parameters."""
        self.values = [a if b is None else b if a is None else a + b for a, b in zip(self.values, values, strict=True)]


def _in_lanes(
    compute: Callable[[Sequence[int], Callable[[Tensor], None], PhaseTimer], dict[int, dict[str, Tensor]]],
    schedule: Schedule,
    parameters: Sequence[Tensor],
    timer: PhaseTimer,
) -> dict[int, dict[str, Tensor]]:
    """Let every lane compute its micro-batches, then give the parameters the sum of its gradients, lane by lane."""

    def one(numbers: Sequence[int]) -> tuple[dict[int, dict[str, Tensor]], _GradientSum, dict[str, float]]:
        sums, clock = _GradientSum(parameters), PhaseTimer()
        return compute(numbers, sums.add, clock), sums, clock.seconds()

    found = schedule.by_lane(one, seed=int(torch.randint(2**62, ())))
    total = _GradientSum(parameters)
    for _, sums, seconds in found:
        total.join(sums.values)
        timer.credit({name: spent / len(found) for name, spent in seconds.items()})
    for p, value in zip(parameters, total.values, strict=True):
        # A copy, for the reason given in `join`: clipping writes into it.
        p.grad = None if value is None else value.clone(memory_format=torch.contiguous_format)
    return {number: parts for reported, _, _ in found for number, parts in reported.items()}
