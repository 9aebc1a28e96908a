"""Where matrix products in a half precision are faster done in float32.

A processor without bfloat16 instructions emulates them at a quarter of its float32 speed. There, a product is computed
from operands widened on the fly and rounded once at the end, which is at least as exact: hardware accumulates in
float32 as well. A processor that has them in tiles (AMX) is still the faster in float32 at the many small products of an
attention's backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agilerl.hardware import is_better_wide, is_slow_to_start

__all__ = ["WideLinear", "install", "wide_attention"]

_FEW_KEYS = 400
"""Up to so many, tiled bfloat16 products make an attention's backward pass slower than float32 does."""


class _WideProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` in float32, rounded to the dtype of ``x``; keeps the unwidened operands only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_weight else None, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wide = grad.float()
        rows = wide.reshape(-1, wide.shape[-1])
        grad_x = (wide @ weight.float()).to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if x is not None else None
        grad_bias = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


class _WideAttention(torch.autograd.Function):
    """Scaled dot-product attention, the backward pass in float32 and rounded; keeps unwidened arrays only.

    `wide` tells whether the forward pass is computed in float32 as well.

    PyTorch's processor kernels are called by name because what they keep for their backward pass would be float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, wide: bool) -> Tensor:
        work = torch.float32 if wide else q.dtype
        result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.to(work), k.to(work), v.to(work), 0.0, mask is None, attn_mask=mask, scale=scale
        )
        out = result.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, sums, mask = ctx.saved_tensors
        wide = [t.float() for t in (grad, q, k, v, out)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return *(t.to(q.dtype) for t in grads), None, None, None


def wide_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """Attention with the passes computed in float32 that are faster so, or None where none is or can be.

    Args:
        q: ``[1, heads, T, d]``.
        k: ``[1, key heads, S, d]``; query heads attend to them in groups.
        v: ``[1, key heads, S, d]``.
        mask: Boolean ``[T, S]``, True where attention is allowed; None is causal.
        scale: Factor of the scores.
    """
    if q.dtype != k.dtype or q.dtype != v.dtype or q.shape[-1] != v.shape[-1]:
        return None
    wide = is_better_wide(q)
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if not wide and not (is_trained and k.shape[2] <= _FEW_KEYS and is_slow_to_start(q)):
        return None
    bias = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return _WideAttention.apply(q, k, v, bias, scale, wide)  # type: ignore[return-value]


class WideLinear(nn.Linear):
    """A linear layer whose products are computed in float32 where that is faster; otherwise an ordinary one."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to ``[..., in]``."""
        if is_better_wide(input) and input.dtype == self.weight.dtype and not torch.is_autocast_enabled("cpu"):
            return _WideProduct.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return super().forward(input)


def install(model: nn.Module) -> int:
    """Let plain linear layers of a half-precision model on such a processor compute wide; return how many there are.

    The head is left alone: the loss works on its weight directly.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and module is not head and is_better_wide(module.weight):
            module.__class__ = WideLinear
            count += 1
    return count
