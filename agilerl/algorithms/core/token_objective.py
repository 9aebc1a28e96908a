"""The objective of supervised fine-tuning: weighted negative log-likelihood of the trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agilerl.algorithms.core.schedule import Schedule
from agilerl.distributed import Runtime
from agilerl.losses import TokenSum, linear_cross_entropy
from agilerl.models.head import Head, final_hidden_states
from agilerl.models.router_loss import balance_loss, find_routers, rows_of_cells, watch_routers
from agilerl.models.segments import MicroBatch, Packer, Sample

__all__ = ["TokenObjective"]


@dataclass(frozen=True)
class TokenObjective:
    """Sum of weight x NLL over the targets, per sum of weights. Rows are `Sample`s.

    On request with the balance of a mixture of experts, per real token.

    Attributes:
        head: The model's head.
        packer: How rows become micro-batches.
        chunk_rows: Rows of one tile of logits; None derives it from the vocabulary.
        cross_entropy: The loss, with the interface of `linear_cross_entropy`.
        router_coef: Weight of the routers' balance loss; 0 leaves the routers alone.
    """

    head: Head
    packer: Packer
    chunk_rows: int | None = None
    cross_entropy: Callable[..., TokenSum] = linear_cross_entropy
    router_coef: float = 0.0

    def units(self, rows: Sequence[Sample]) -> dict[str, float]:
        """Weights, trained tokens, real tokens and rows."""
        weights = [row.weights[1:] for row in rows]  # nothing predicts the first token
        return {
            "weight": float(sum(w.double().sum().item() for w in weights)),
            "trained_tokens": float(sum(int((w != 0).sum()) for w in weights)),
            "real_tokens": float(sum(len(row.ids) for row in rows)),
            "rows": float(len(rows)),
        }

    def required(self) -> str:
        """Without a trained token there is no loss."""
        return "weight"

    def lengths(self, rows: Sequence[Sample]) -> list[int]:
        """Real tokens of each row."""
        return [len(row.ids) for row in rows]

    def plan(self, lengths: Sequence[int], max_rows: int | None) -> list[list[int]]:
        """Row indices of each micro-batch."""
        return self.packer.plan(lengths, max_rows)

    def plan_lanes(
        self, lengths: Sequence[int], max_rows: int | None
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Smaller micro-batches to compute side by side, and which lane computes which."""
        return self.packer.plan_lanes(lengths, max_rows)

    def collate(self, rows: Sequence[Sample], device: torch.device) -> MicroBatch:
        """One micro-batch on the device."""
        micro = self.packer.collate(rows, device)
        if self.router_coef:
            micro.cell_rows = rows_of_cells(micro, self.lengths(rows)).to(device, non_blocking=True)
        return micro

    def prepare(self, rows: Sequence[Sample], schedule: Schedule, runtime: Runtime) -> None:
        """Nothing is needed beforehand."""

    def running(self, model: nn.Module, micro: MicroBatch) -> AbstractContextManager[object]:
        """Attention that keeps the samples of the micro-batch apart."""
        return self.packer.running(model, micro)

    def loss(self, model: nn.Module, micro: MicroBatch, units: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the mean loss that this micro-batch makes up; reports the NLL sum and the cells computed."""
        routers = find_routers(model) if self.router_coef else []
        with watch_routers(routers) as routed:
            hidden = final_hidden_states(model, micro.inputs)  # [B, L, H]
        hidden = hidden.flatten(0, 1).index_select(0, micro.predict_from)  # [N, H]
        nll = self.cross_entropy(hidden, self.head, micro.targets, micro.weights, chunk_rows=self.chunk_rows)
        cells = torch.tensor(float(micro.num_cells if micro.num_rows else 0), device=nll.total.device)
        loss, parts = nll.total / units["weight"], {"loss": nll.total.detach(), "cells": cells}
        if micro.cell_rows is not None:
            balance = balance_loss(routed, micro.cell_rows, max(micro.num_rows, 1))
            loss = loss + self.router_coef * balance / units["real_tokens"]
            parts["router_aux"] = balance.detach()
        return loss, parts
