"""Weighted cross-entropy from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agilerl.losses.heads import HeadLike, default_chunk_rows
from agilerl.losses.tile import Plan, accumulation_dtype, tile_gradient, tile_nll
from agilerl.losses.token_sum import TokenSum

__all__ = ["linear_cross_entropy", "token_logprobs"]


def linear_cross_entropy(
    hidden: Tensor,
    head: HeadLike,
    targets: Tensor,
    weights: Tensor,
    *,
    chunk_rows: int | None = None,
    need_grad: bool = True,
) -> TokenSum:
    """Sum of ``weights * -log p(target)`` and the sum of weights.

    For a plain linear head the gradient is made tile by tile in the forward pass, while the tile's softmax is at hand,
    and only scaled by the backward pass; memory is one tile of [chunk_rows, V] whatever N is. A frozen head costs no
    weight gradient. Any other head (LoRA on it, a trained copy) is called as a module, tile by tile, and recomputed in
    the backward pass.

    Args:
        hidden: Final hidden states at the positions that predict, [N, H].
        head: The model's head.
        targets: Long [N].
        weights: [N]; any real numbers, no gradient flows into them.
        chunk_rows: Rows of one tile; None derives it from the vocabulary.
        need_grad: False skips everything that only the backward pass needs.
    """
    need_grad = need_grad and torch.is_grad_enabled()
    size = chunk_rows or default_chunk_rows(head.vocab_size)
    linear = head.linear()
    dtype = accumulation_dtype(hidden.dtype if linear is None else linear[0].dtype)
    weights = weights.detach().to(dtype)
    if linear is None:
        total = (
            hidden[:0].sum().to(dtype)
        )  # zero, but part of the graph: a micro-batch without targets has a backward pass too
        for rows in _tiles(hidden.shape[0], size):
            nll = _module_nll(head, hidden[rows], targets[rows], need_grad).to(dtype)
            total = total + torch.dot(nll, weights[rows])
    else:
        total = _LinearCrossEntropy.apply(hidden, *linear, targets, weights, head.scale, head.softcap, size, need_grad)
    return TokenSum(total, weights.sum())  # type: ignore[arg-type]


def token_logprobs(hidden: Tensor, head: HeadLike, targets: Tensor, *, chunk_rows: int | None = None) -> Tensor:
    """Log-probability of each target, [N], differentiable; one tile of logits at a time.

    Args:
        hidden: [N, H].
        head: The model's head.
        targets: Long [N].
        chunk_rows: Rows of one tile; None derives it from the vocabulary.
    """
    size = chunk_rows or default_chunk_rows(head.vocab_size)
    linear = head.linear()
    if linear is not None:
        return _LinearLogprobs.apply(hidden, *linear, targets, head.scale, head.softcap, size)  # type: ignore[return-value]
    need_grad = torch.is_grad_enabled()
    parts = [-_module_nll(head, hidden[rows], targets[rows], need_grad) for rows in _tiles(hidden.shape[0], size)]
    return torch.cat(parts) if parts else hidden.sum(dim=-1).to(accumulation_dtype(hidden.dtype))


def _tiles(rows: int, size: int) -> Iterator[slice]:
    """As few tiles as `size` allows, as even as can be: a small last one would be slower per row."""
    count = max(1, -(-rows // size))
    return (slice(rows * i // count, rows * (i + 1) // count) for i in range(count if rows else 0))


def _module_nll(head: HeadLike, hidden: Tensor, targets: Tensor, need_grad: bool) -> Tensor:
    def nll(rows: Tensor) -> Tensor:
        logits = head.logits(rows)
        return torch.nn.functional.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets, reduction="none")

    if not need_grad:
        with torch.no_grad():
            return nll(hidden)
    return checkpoint(nll, hidden, use_reentrant=False)  # type: ignore[return-value]


class _LinearCrossEntropy(torch.autograd.Function):
    """Total of a plain linear head; gradients for hidden states, weight and bias are ready when forward returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        scale: float,
        softcap: float | None,
        size: int,
        need_grad: bool,
    ) -> Tensor:
        plan = Plan(weight, bias, scale, softcap)
        wants = [need_grad and wanted for wanted in ctx.needs_input_grad[:3]]
        grads = _Gradients(hidden, plan, wants)
        total = weights.new_zeros(())
        for rows in _tiles(hidden.shape[0], size):
            tile = tile_nll(hidden[rows], targets[rows], plan, need_slope=any(wants))
            total += torch.dot(tile.nll, weights[rows])
            if any(wants):
                grads.add(rows, tile_gradient(tile, targets[rows], weights[rows], plan), hidden[rows])
            del tile  # before there is a second one
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # The scalar stays in full precision: rounded to bfloat16 it would bend every gradient of the step the same way.
        scaled = [
            None if saved is None else (saved.to(grad_total.dtype) * grad_total).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None, None


class _Gradients:
    """Buffers for the gradients that are wanted; those of the weight and bias are summed in full precision."""

    def __init__(self, hidden: Tensor, plan: Plan, wants: list[bool]) -> None:
        dtype = accumulation_dtype(plan.weight.dtype)
        self.plan = plan
        self.hidden = torch.empty_like(hidden) if wants[0] else None
        self.weight = torch.zeros_like(plan.weight, dtype=dtype) if wants[1] else None
        self.bias = torch.zeros_like(plan.bias, dtype=dtype) if wants[2] and plan.bias is not None else None

    def add(self, rows: slice, gradient: Tensor, hidden: Tensor) -> None:
        """Take in the gradient [n, V] at the linear layer's output."""
        if self.hidden is not None:
            self.hidden[rows] = gradient @ self.plan.weight.to(gradient.dtype)
        if self.weight is not None:
            if gradient.dtype == self.weight.dtype:
                self.weight.addmm_(gradient.t(), hidden.to(gradient.dtype))  # without a product as large as the weight
            else:
                self.weight += gradient.t() @ hidden.to(gradient.dtype)
        if self.bias is not None:
            self.bias += gradient.sum(dim=0)


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities of a plain linear head.

    A frozen head's gradient is made in the forward pass: each target's own, [N, H], which the backward pass only scales.
    A trained head's needs the incoming factors first, so its logits are recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        size: int,
    ) -> Tensor:
        plan = Plan(weight, bias, scale, softcap)
        result = torch.empty(hidden.shape[0], dtype=accumulation_dtype(weight.dtype), device=hidden.device)
        is_frozen = not any(ctx.needs_input_grad[1:3])
        grads = _Gradients(hidden, plan, [is_frozen and ctx.needs_input_grad[0], False, False])
        for rows in _tiles(hidden.shape[0], size):
            tile = tile_nll(hidden[rows], targets[rows], plan, need_slope=grads.hidden is not None)
            result[rows] = -tile.nll
            if grads.hidden is not None:
                grads.add(rows, tile_gradient(tile, targets[rows], -torch.ones_like(tile.nll), plan), hidden[rows])
            del tile  # before there is a second one
        ctx.save_for_backward(*((None,) * 4 if is_frozen else (hidden, weight, bias, targets)), grads.hidden)
        ctx.plan = (scale, softcap, size)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, made = ctx.saved_tensors
        if hidden is None:
            grad = None if made is None else (made.to(grad_result.dtype) * grad_result.unsqueeze(1)).to(made.dtype)
            return grad, None, None, None, None, None, None
        *maps, size = ctx.plan
        plan = Plan(weight, bias, *maps)
        grads = _Gradients(hidden, plan, list(ctx.needs_input_grad[:3]))
        for rows in _tiles(hidden.shape[0], size):
            tile = tile_nll(hidden[rows], targets[rows], plan, need_slope=True)
            grads.add(rows, tile_gradient(tile, targets[rows], -grad_result[rows], plan), hidden[rows])
            del tile
        cast = [None if grad is None else grad.to(weight.dtype) for grad in (grads.weight, grads.bias)]
        return grads.hidden, *cast, None, None, None, None
