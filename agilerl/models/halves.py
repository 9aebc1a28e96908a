"""Where matrix products in a half precision are faster done in float32.

A processor without bfloat16 instructions emulates them at a quarter of its float32 speed. There, a product is computed
from operands widened on the fly and rounded once at the end, which is at least as exact: hardware accumulates in
float32 as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agilerl.hardware import is_better_wide

__all__ = ["WideLinear", "install"]


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
