"""Norms and gated units as one autograd function each.

Written as models write them, a root-mean-square norm is six passes over the activation and a gated unit stores three
arrays where two are enough. The functions here take fewer passes and store the least. They compute in training and
evaluation (see `forms`), and only in modules for which a numeric probe, with weights drawn at random, shows that the
result is the module's own, bit by bit or to the last place. Models in float64 keep their own norms, which makes them the
yardstick.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from agilerl.models.forms import are_fast
from agilerl.models.halves import WideLinear
from agilerl.models.modules import probing

__all__ = ["install"]

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _RMSNorm(torch.autograd.Function):
    """``x / rms(x) * (weight + offset)`` (arXiv 1910.07467), the mean square in float32, whatever the dtype.

    `rounds_early` is the order in half precision: to round the normed value before the weight is applied, or after.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float, rounds_early: bool) -> Tensor:
        size = x.shape[-1]
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(size).add_(epsilon).rsqrt_()  # [..., 1]
        factor = weight if offset == 0.0 else weight.float() + offset
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        if x.dtype == torch.float32:
            return (wide * inverse).mul_(factor)
        if rounds_early:
            return (wide * inverse).to(x.dtype).mul_(factor)
        return (wide * inverse).mul_(factor).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        wide, slope = x.float(), grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            dims = tuple(range(x.ndim - 1))
            grad_weight = (slope * wide).mul_(inverse).sum(dims).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            factor = weight.float() if ctx.offset == 0.0 else weight.float() + ctx.offset
            scaled = slope * factor
            along = torch.linalg.vecdot(scaled, wide).unsqueeze(-1)  # [..., 1]
            pull = along.mul_(inverse.square()).div_(-x.shape[-1])
            grad_x = scaled.addcmul_(wide, pull).mul_(inverse).to(x.dtype)
        return grad_x, grad_weight, None, None, None


class _Operands(torch.autograd.Function):
    """``gate``, kept with ``up``; stands for their product in backward.

    They are kept before the product is computed: where a block is recomputed, it ends with the last thing that it keeps.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.view_as(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


class _Product(torch.autograd.Function):
    """``silu(gate) * up``, whose gradients `_Operands` computes from the product's."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv 2002.05202); keeps its two inputs and recomputes the rest."""
    return _Product.apply(_Operands.apply(gate, up), up.detach())  # type: ignore[return-value]


class _FusedNorm:
    """Mixed in before a model's own norm class; `_fused_norm` holds epsilon, offset and the order of rounding."""

    weight: Tensor
    _fused_norm: tuple[float, float, bool]

    def forward(self, hidden_states: Tensor) -> Tensor:
        is_sharded = type(self.weight) not in (Tensor, nn.Parameter)
        if not are_fast() or hidden_states.dtype != self.weight.dtype or is_sharded:
            return super().forward(hidden_states)  # type: ignore[misc]
        return _RMSNorm.apply(hidden_states, self.weight, *self._fused_norm)  # type: ignore[return-value]


class _FusedGate:
    """Mixed in before a model's own gated unit."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not are_fast():
            return super().forward(x)  # type: ignore[misc]
        product = _silu_gate(self.gate_proj(x), self.up_proj(x))
        with _keeping_weights() if _keeps_weights_only(self.down_proj) else nullcontext():
            return self.down_proj(product)


def _keeps_weights_only(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, WideLinear) and not any(p.requires_grad for p in module.parameters())


def _keeping_weights() -> AbstractContextManager[None]:
    """Leave what is kept for backward where it is, and out of what a recomputed block counts.

    Frozen weights are in memory anyway. Were they counted, recomputation would go on until it comes to them.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@lru_cache(maxsize=256)
def _mixed(mixin: type, cls: type) -> type:
    """A subclass of a model's own class, which keeps its name, so that printing and lookups by name stay the same."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _takes_one_input(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2


def _draw(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)


def _epsilon(module: nn.Module) -> float | None:
    return next((getattr(module, n) for n in _EPSILON_NAMES if isinstance(getattr(module, n, None), float)), None)


def _norm_settings(module: nn.Module) -> tuple[float, float, bool] | None:
    """What makes `_RMSNorm` compute this module, found by trying; None where nothing does."""
    weight, epsilon = getattr(module, "weight", None), _epsilon(module)
    if type(weight) is not nn.Parameter or weight.ndim != 1 or weight.dtype not in _DTYPES or epsilon is None:
        return None
    owns_more = len(list(module.parameters())) + len(list(module.buffers())) + len(list(module.children())) != 1
    if owns_more or weight.is_meta or not _takes_one_input(module):
        return None
    drawn = _draw(weight.shape[0], like=weight)
    # The small input shows whether epsilon enters in the same place.
    inputs = [_draw(8, weight.shape[0], like=weight) * scale for scale in (3.0, 1e-3)]
    expected = [functional_call(module, {"weight": drawn}, (x,)) for x in inputs]
    for offset, rounds_early in ((0.0, True), (0.0, False), (1.0, True), (1.0, False)):
        settings = (epsilon, offset, rounds_early)
        found = [_RMSNorm.apply(x, drawn, *settings) for x in inputs]
        if all(_agrees(a, b) for a, b in zip(found, expected, strict=True)):
            return settings
    return None


def _agrees(found: Any, expected: Tensor) -> bool:
    if found.dtype != expected.dtype:
        return False
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=2e-6, atol=1e-7)
    # In half precision another order of rounding shows in many elements; one in a hundred is a tie broken differently.
    return float((found != expected).float().mean()) <= 0.01


def _is_gated_unit(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation, size = getattr(module, "act_fn", None), getattr(parts[0], "in_features", None)
    if not all(isinstance(part, nn.Module) for part in (*parts, activation)) or size is None:
        return False
    weight = next(module.parameters())
    if weight.is_meta or not weight.is_floating_point() or not _takes_one_input(module):
        return False
    gate, up, down = parts
    x = _draw(4, size, like=weight)
    points = torch.linspace(-8, 8, 101, device=x.device, dtype=x.dtype)
    is_silu = torch.equal(activation(points), F.silu(points))  # type: ignore[misc]
    return is_silu and torch.equal(module(x), down(F.silu(gate(x)) * up(x)))  # type: ignore[misc]


def install(model: nn.Module) -> dict[str, int]:
    """Put the fused functions in the place of the norms and gated units that they compute exactly.

    Only the class of a module changes, to a subclass of its own: parameters, names and saving are untouched. Modules of
    one class, size and epsilon are probed once.

    Returns:
        How many modules of each kind were taken over.
    """
    counts = {"norms": 0, "gated units": 0}
    norms: dict[Any, tuple[float, float, bool] | None] = {}
    gates: dict[type, bool] = {}
    with probing(model):
        for module in model.modules():
            if isinstance(module, _FusedNorm | _FusedGate):
                continue
            weight = getattr(module, "weight", None)
            key = (type(module), getattr(weight, "shape", None), getattr(weight, "dtype", None), _epsilon(module))
            if key not in norms:
                norms[key] = _norm_settings(module)
            if type(module) not in gates:
                gates[type(module)] = _is_gated_unit(module)
            if (settings := norms[key]) is not None:
                module.__class__ = _mixed(_FusedNorm, type(module))
                module._fused_norm = settings  # type: ignore[assignment]
                counts["norms"] += 1
            elif gates[type(module)]:
                module.__class__ = _mixed(_FusedGate, type(module))
                counts["gated units"] += 1
    return counts
