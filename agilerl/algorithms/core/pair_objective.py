"""The objective of preference optimisation: a loss per pair, and the chosen answers' own likelihood beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.algorithms.core.schedule import Schedule
from agilerl.distributed import Runtime
from agilerl.losses import token_logprobs
from agilerl.losses.preference import needs_reference, preference_loss
from agilerl.models.head import Head, final_hidden_states
from agilerl.models.segments import Packer
from agilerl.models.shared_prompt import Pair, PairMicroBatch, collate_pairs, pair_length

__all__ = ["PairObjective", "ReferenceLogprobs", "pair_key"]


def pair_key(pair: Pair) -> bytes:
    """16 bytes that identify the content of a pair: ids and weights of both answers."""
    digest = hashlib.blake2b(digest_size=16)
    for ids, weights, *_ in pair:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.cpu().to(torch.int64).numpy().tobytes())
        digest.update(weights.cpu().to(torch.float64).numpy().tobytes())
    return digest.digest()


@dataclass
class ReferenceLogprobs:
    """Summed log-probabilities of answers under the fixed reference: pair key -> (chosen, rejected)."""

    values: dict[bytes, tuple[float, float]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything: the reference has changed."""
        self.values.clear()

    def lookup(self, keys: Sequence[bytes], like: Tensor) -> Tensor:
        """[P, 2], in the type and on the device of ``like``."""
        return torch.tensor([self.values[key] for key in keys], dtype=like.dtype, device=like.device).reshape(-1, 2)

    def tensors(self) -> dict[str, Tensor]:
        """Keys [n, 16] and values [n, 2], for checkpoints."""
        keys = torch.frombuffer(bytearray(b"".join(self.values)), dtype=torch.uint8) if self.values else torch.zeros(0)
        values = torch.tensor(list(self.values.values()), dtype=torch.float64)
        return {"keys": keys.to(torch.uint8).reshape(-1, 16), "values": values.reshape(-1, 2)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        pairs = zip(tensors["keys"], tensors["values"].tolist(), strict=True)
        self.values = {bytes(key.tolist()): (chosen, rejected) for key, (chosen, rejected) in pairs}


@dataclass(frozen=True)
class PairObjective:
    """Loss per pair over pairs, plus ``nll_alpha`` times the chosen answers' NLL over their tokens. Rows are `Pair`s.

    Attributes:
        head: The model's head.
        packer: How rows become micro-batches.
        values: Present values of ``beta`` and ``nll_alpha``.
        loss_type: One of `agilerl.losses.preference.PREFERENCE_LOSSES`.
        label_smoothing: Share of labels assumed to be wrong.
        margin: Target margin of ``simpo``.
        share_prompt: Compute the prompt of a pair once.
        reference: What has been computed under the reference.
        as_reference: Makes the model compute as the reference inside a ``with`` block; gives the module to run.
        chunk_rows: Rows of one tile of logits.
    """

    head: Head
    packer: Packer
    values: Mapping[str, Any]
    loss_type: str
    label_smoothing: float
    margin: float
    share_prompt: bool
    reference: ReferenceLogprobs
    as_reference: Callable[[], AbstractContextManager[tuple[nn.Module, Head]]]
    chunk_rows: int | None = None

    def units(self, rows: Sequence[Pair]) -> dict[str, float]:
        """Pairs, weight of the chosen answers, trained and computed tokens."""
        answers = [[sample.weights[1:] for sample in pair] for pair in rows]
        return {
            "pairs": float(len(rows)),
            "chosen_weight": float(sum(chosen.double().sum().item() for chosen, _ in answers)),
            "answer_weight": float(sum(w.double().sum().item() for pair in answers for w in pair)),
            "trained_tokens": float(sum(int((w != 0).sum()) for pair in answers for w in pair)),
            "real_tokens": float(sum(self.lengths(rows))),
            "rows": float(len(rows)),
        }

    def required(self) -> str:
        """Without a trained token of a chosen answer there is no loss."""
        return "chosen_weight"

    def lengths(self, rows: Sequence[Pair]) -> list[int]:
        """Tokens that the model computes for each pair."""
        return [pair_length(pair, self.packer, share_prompt=self.share_prompt) for pair in rows]

    def plan(self, lengths: Sequence[int], max_rows: int | None) -> list[list[int]]:
        """Row indices of each micro-batch; ``max_rows`` counts pairs."""
        return self.packer.plan(lengths, max_rows)

    def plan_lanes(
        self, lengths: Sequence[int], max_rows: int | None
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Smaller micro-batches to compute side by side, and which lane computes which."""
        return self.packer.plan_lanes(lengths, max_rows)

    def collate(self, rows: Sequence[Pair], device: torch.device) -> PairMicroBatch:
        """One micro-batch on the device."""
        keys = [pair_key(pair) for pair in rows]
        return collate_pairs(self.packer, rows, keys, device, share_prompt=self.share_prompt)

    def running(self, model: nn.Module, micro: PairMicroBatch) -> AbstractContextManager[object]:
        """Attention that keeps answers apart."""
        return self.packer.running(model, micro.micro)

    def prepare(self, rows: Sequence[Pair], schedule: Schedule, runtime: Runtime) -> None:
        """Compute what is missing of the reference, in the very micro-batches that the policy is about to compute.

        The same shapes and threads give the same rounding, so that policy and reference agree to the bit while they are
        equal. All ranks take part where one lacks a value, as a sharded model needs.
        """
        if not needs_reference(self.loss_type):
            return
        missing = any(pair_key(pair) not in self.reference.values for pair in rows)
        if not runtime.any(missing):
            return
        # Nothing that computes here requires a gradient, so no graph is kept. Gradient mode stays on all the same: modules
        # that round differently in it (fused norms and adapters) must do for the reference what they do for the policy.
        with torch.enable_grad(), self.as_reference() as (model, head):

            def compute(indices: Sequence[int]) -> tuple[Sequence[bytes], list[list[float]]]:
                micro = self.collate([rows[i] for i in indices], runtime.device)
                with runtime.running(model), self.running(model, micro):
                    return micro.keys, self._answers(model, head, micro)[0].detach().double().tolist()

            for keys, sums in schedule.each(compute):
                for key, pair in zip(keys, sums, strict=False):
                    self.reference.values.setdefault(key, (pair[0], pair[1]))

    def loss(
        self, model: nn.Module, micro: PairMicroBatch, units: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the loss that this micro-batch makes up, and totals over its pairs to report."""
        policy, lengths = self._answers(model, self.head, micro)  # [P, 2]
        beta, alpha = float(self.values["beta"]), float(self.values["nll_alpha"])
        compares = needs_reference(self.loss_type) and micro.num_pairs > 0
        reference = self.reference.lookup(micro.keys, policy) if compares else torch.zeros_like(policy)
        losses = preference_loss(
            self.loss_type,
            policy,
            reference,
            lengths,
            beta=beta,
            label_smoothing=self.label_smoothing,
            margin=self.margin,
        )
        nll = -policy[:, 0].sum()
        loss = losses.sum() / units["pairs"] + alpha * nll / units["chosen_weight"]
        with torch.no_grad():
            ratios = policy - reference
            if self.loss_type in ("sigmoid_norm", "simpo"):
                ratios = ratios / lengths
            parts = {
                "preference_loss": losses.detach().sum(),
                "nll": nll.detach(),
                "chosen_ratio": ratios[:, 0].sum(),
                "rejected_ratio": ratios[:, 1].sum(),
                "accuracy": (ratios[:, 0] > ratios[:, 1]).sum().to(policy.dtype),
                "preferred": (policy[:, 0] > policy[:, 1]).sum().to(policy.dtype),
                "chosen_logp": policy[:, 0].sum(),
                "rejected_logp": policy[:, 1].sum(),
                "kl": (policy - reference).sum() if compares else torch.zeros_like(nll),
                "cells": policy.new_tensor(float(micro.micro.num_cells if micro.num_pairs else 0)),
            }
        return loss, {name: value.detach() for name, value in parts.items()}

    def _answers(self, model: nn.Module, head: Head, micro: PairMicroBatch) -> tuple[Tensor, Tensor]:
        """Weighted log-probability and weight of each answer, both [P, 2]; [0, 2] with a graph for an empty micro-batch."""
        inner = micro.micro
        hidden = final_hidden_states(model, inner.inputs).flatten(0, 1).index_select(0, inner.predict_from)  # [N, H]
        logprobs = token_logprobs(hidden, head, inner.targets, chunk_rows=self.chunk_rows)  # [N]
        weights = inner.weights.to(logprobs.dtype)
        if not micro.num_pairs:
            return (logprobs * weights).sum().expand(1, 2)[:0], weights.new_zeros(0, 2)
        size = 2 * micro.num_pairs
        sums = logprobs.new_zeros(size).index_add(0, inner.rows, logprobs * weights)
        lengths = weights.new_zeros(size).index_add(0, inner.rows, weights)
        return sums.view(-1, 2), lengths.view(-1, 2)
