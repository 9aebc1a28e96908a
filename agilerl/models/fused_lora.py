"""LoRA on a linear layer as one autograd function.

PEFT runs a LoRA layer (arXiv 2106.09685) as six operations, each of which stores its input; adapters in float32 over a
bfloat16 base make it cast the whole activation besides. Here a layer keeps its input, the rank-sized product and the
dropped positions, casts the small factors instead of the activation, and computes no gradient for the frozen base.

Only the plain case is taken over; everything else (merged, disabled or several adapters, DoRA and other variants,
quantised bases, hooks on the inner modules, sharded factors) goes through PEFT's own forward, decided at each call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agilerl.hardware import is_better_wide
from agilerl.models.dropout import draw_dropped, zero_dropped_
from agilerl.models.forms import are_fast
from agilerl.models.halves import WideLinear
from agilerl.models.modules import has_hooks

__all__ = ["FusedLoraLinear", "install"]


class _LoraProduct(torch.autograd.Function):
    """``x @ W.T + bias + scale * drop(x) @ A.T @ B.T`` with x ``[T, in]``, A ``[r, in]``, B ``[out, r]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        rate: float,
    ) -> Tensor:
        dropped = draw_dropped(x, rate) if rate > 0 else None
        # Kept elements are divided by 1 - rate: a factor of the small product instead of a pass over the activation.
        factor = scale / (1.0 - rate)
        work = torch.float32 if is_better_wide(x) else x.dtype
        wide, narrow_a, narrow_b = x.to(work), a.to(work), b.to(work)
        out = F.linear(wide, weight.to(work), None if bias is None else bias.to(work))
        inner = F.linear(_kept(wide, dropped, is_copy=work != x.dtype), narrow_a)  # [T, r]
        out.addmm_(inner, narrow_b.t(), alpha=factor)
        ctx.save_for_backward(x, weight, a, b, inner, dropped)
        ctx.factor, ctx.work = factor, work
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, inner, dropped = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b = ctx.needs_input_grad[:5]
        work = ctx.work
        wide = grad.to(work)
        grad_inner = (wide @ b.to(work)).mul_(ctx.factor) if needs_x or needs_a else None  # [T, r]
        grad_b = (wide.t() @ inner).mul_(ctx.factor).to(b.dtype) if needs_b else None
        grad_a = grad_x = grad_weight = grad_bias = None
        if needs_a and grad_inner is not None:
            grad_a = (grad_inner.t() @ _kept(x.to(work), dropped, is_copy=work != x.dtype)).to(a.dtype)
        if needs_x and grad_inner is not None:
            grad_x = wide @ weight.to(work)
            _add_kept_(grad_x, grad_inner, a.to(work), dropped)
            grad_x = grad_x.to(x.dtype)
        if needs_weight:
            grad_weight = (wide.t() @ x.to(work)).to(weight.dtype)
        if needs_bias:
            grad_bias = wide.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, grad_a, grad_b, None, None


def _kept(x: Tensor, dropped: Tensor | None, *, is_copy: bool) -> Tensor:
    """The input with its dropped elements at zero; written in place only where it is a copy already."""
    if dropped is None:
        return x
    return zero_dropped_(x if is_copy else x.clone(), dropped)


def _add_kept_(target: Tensor, left: Tensor, right: Tensor, dropped: Tensor | None) -> None:
    """Add ``left @ right`` to `target` except at the dropped positions."""
    if dropped is None:
        target.addmm_(left, right)
    elif dropped.dtype == torch.bool:
        target += zero_dropped_(left @ right, dropped)
    else:
        # Few positions: put their old values back, instead of making a second array of the size of the activation.
        flat = target.view(-1)
        before = flat.index_select(0, dropped)
        target.addmm_(left, right)
        flat.index_copy_(0, dropped, before)


class FusedLoraLinear(LoraLinear):
    """PEFT's LoRA linear layer with one fused function for the plain case. Parameters and names are PEFT's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the layer to ``[..., in]``, as PEFT defines it."""
        adapter = None if args or kwargs else self._plain_adapter(x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base, dropout = self.base_layer, self.lora_dropout[adapter]
        rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        rows = x.reshape(-1, x.shape[-1])
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        out: Tensor = _LoraProduct.apply(rows, base.weight, base.bias, a, b, self.scaling[adapter], rate)  # type: ignore[assignment]
        return out.view(*x.shape[:-1], out.shape[-1])

    def _plain_adapter(self, x: Tensor) -> str | None:
        """Name of the one adapter to apply, or None where PEFT's own forward is needed."""
        if self.disable_adapters or self.merged:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or names[0] in self.lora_variant:
            return None
        (name,) = names
        factors = self.lora_A[name].weight.dtype
        if not are_fast() and factors == x.dtype and not is_better_wide(x):
            return None  # nothing to gain: inference stays PEFT's, bit by bit
        base, a, b, dropout = self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        is_plain = (
            type(base) in (nn.Linear, WideLinear)
            and type(a) is nn.Linear
            and type(b) is nn.Linear
            and b.bias is None
            and type(dropout) in (nn.Dropout, nn.Identity)
            and not (isinstance(dropout, nn.Dropout) and dropout.training and dropout.p >= 1.0)
            and not any(has_hooks(module) for module in (base, a, b, dropout))
            and all(type(p) in (Tensor, nn.Parameter) for p in (base.weight, a.weight, b.weight))
            and base.weight.dtype == x.dtype
            and (a.weight.dtype == b.weight.dtype)
            and (a.weight.dtype == x.dtype or (a.weight.dtype == torch.float32 and x.element_size() == 2))
            and not torch.is_autocast_enabled(x.device.type)
        )
        return name if is_plain else None


def install(model: nn.Module) -> int:
    """Let the plain LoRA linear layers of a model compute fused; return how many there are.

    Only the class of each layer changes: names, parameters, saving and merging stay PEFT's. Calling it again is harmless.
    """
    layers = [module for module in model.modules() if type(module) in (LoraLinear, FusedLoraLinear)]
    for layer in layers:
        layer.__class__ = FusedLoraLinear
    return len(layers)
