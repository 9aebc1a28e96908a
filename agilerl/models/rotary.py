"""Rotary position embeddings (arXiv 2104.09864) as one autograd function.

Models rotate queries and keys by a function of their modeling file, in nine passes over the activation with twice as many
nodes in the graph. The function here takes two. It stands in for that function inside of micro-batches only, where a numeric
probe of the very function shows the same result; models in float64 keep their own, which makes them the yardstick.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agilerl.models.forms import in_micro_batch

__all__ = ["install"]

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Rotation(torch.autograd.Function):
    """``[x1 cos1 - x2 sin1, x2 cos2 + x1 sin2]`` of the halves of the last dimension; cos and sin are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _turned(x, cos, -first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return _turned(grad, cos, second, -first), None, None


def _turned(x: Tensor, cos: Tensor, of_second: Tensor, of_first: Tensor) -> Tensor:
    out = x * cos
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    out1.addcmul_(x2, of_second)
    out2.addcmul_(x1, of_first)
    return out


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if not in_micro_batch() or not _is_plain(q, k, cos, sin):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)

    return apply_rotary_pos_emb


def _is_plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    tensors = (q, k, cos, sin)
    return (
        all(type(tensor) is Tensor and tensor.dtype == q.dtype for tensor in tensors)
        and q.dtype in _DTYPES
        and all(tensor.shape[-1] == q.shape[-1] for tensor in tensors)
        and q.shape[-1] % 2 == 0
        and not (cos.requires_grad or sin.requires_grad)
    )


@functools.cache
def _can_be_fused(function: Callable[..., Any]) -> bool:
    """Whether a model's function is this rotation, found by trying it on random numbers whose halves differ."""
    if tuple(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8))
    q, k, cos, sin = (torch.randn(size, generator=generator) for size in sizes)
    found = function(q, k, cos, sin)
    wanted = [_Rotation.apply(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]
    return all(torch.allclose(a, b, rtol=2e-6, atol=1e-6) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def install(model: nn.Module) -> int:
    """Let the attention modules of a model rotate fused; return how many there are.

    What is replaced is the name in the modeling file that they call, once for all models of the family. Calling this again
    is harmless.
    """
    count = 0
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
            continue
        function = forward.__globals__.get(_NAME)
        original = getattr(function, "_before_fusing", function)
        if original is None or not _can_be_fused(original):
            continue
        if function is original:
            forward.__globals__[_NAME] = fused = _fused(original)
            fused._before_fusing = original  # type: ignore[attr-defined]
        count += 1
    return count
