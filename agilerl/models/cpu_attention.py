"""Attention of one sample on a processor, where PyTorch's choice can be bettered.

* In half precision some passes are faster in float32 (see `agilerl.hardware`), which is at least as exact.
* A block that is recomputed in backward need not repeat its attention, whose result takes about as much room as the
  block's input, which is kept anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agilerl import recomputing
from agilerl.hardware import is_better_wide, is_slow_to_start

__all__ = ["attention"]

_FEW_KEYS = 400
"""Up to so many, tiled bfloat16 products make an attention's backward pass slower than float32 does."""


class _Attention(torch.autograd.Function):
    """Scaled dot-product attention, each pass in its own precision and rounded; keeps arrays of the inputs' only.

    PyTorch's processor kernels are called by name because SDPA keeps what they were given, and cannot be given a result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        work: torch.dtype,
        back: torch.dtype,
    ) -> Tensor:
        kept, is_again = recomputing.results()
        if is_again and kept:
            out, sums = kept.popleft()
        else:
            result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q.to(work), k.to(work), v.to(work), 0.0, mask is None, attn_mask=mask, scale=scale
            )
            out = result.to(q.dtype)
            if kept is not None and not is_again:
                kept.append((out.detach(), sums))
        ctx.save_for_backward(q, k, v, out, sums, mask)
        ctx.scale, ctx.back = scale, back
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, sums, mask = ctx.saved_tensors
        wide = [t.to(ctx.back) for t in (grad, q, k, v, out)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return *(t.to(q.dtype) for t in grads), None, None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """Attention, or None where PyTorch's own is as good or the only one that can.

    Args:
        q: ``[1, heads, T, d]``.
        k: ``[1, key heads, S, d]``; query heads attend to them in groups.
        v: ``[1, key heads, S, d]``.
        mask: Boolean ``[T, S]``, True where attention is allowed; None is causal.
        scale: Factor of the scores.
    """
    if q.device.type != "cpu" or q.dtype != k.dtype or q.dtype != v.dtype or q.shape[-1] != v.shape[-1]:
        return None
    is_wide = is_better_wide(q)
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    is_short = is_trained and k.shape[2] <= _FEW_KEYS and is_slow_to_start(q)
    is_kept = is_trained and recomputing.results()[0] is not None and not torch.is_autocast_enabled("cpu")
    if not (is_wide or is_short or is_kept):
        return None
    work = torch.float32 if is_wide else q.dtype
    back = torch.float32 if is_wide or is_short else q.dtype
    exact = torch.promote_types(work, torch.float32)
    bias = None if mask is None else torch.zeros(mask.shape, dtype=exact).masked_fill_(~mask, float("-inf"))
    return _Attention.apply(q, k, v, bias, scale, work, back)  # type: ignore[return-value]
