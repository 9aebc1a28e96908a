"""Variable-length flash attention on a GPU, where the installed torch and the device can run it.

Nothing is asked of version numbers: the kernel is tried once on a few tokens, for each kind of input, and its result is
compared with SDPA's. Where it cannot run, `varlen` answers None and the caller attends sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["varlen"]

Mode = Literal["grouped", "repeated"]


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _run(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None, mode: Mode
) -> Tensor:
    """``[1, heads, T, d]`` inputs to ``[1, T, heads, d]``."""
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("this torch has no variable-length attention")
    groups = q.shape[1] // k.shape[1]
    if mode == "repeated" and groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    # The kernel counts the positions to the left of a token; a sliding window counts the token as well.
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"enable_gqa": True} if mode == "grouped" and groups > 1 else {}
    out = kernel(*rows, starts, starts, longest, longest, scale=scale, window_size=(left, 0), **options)
    return out.unsqueeze(0)


@lru_cache(maxsize=64)
def _mode(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, windowed: bool
) -> Mode | None:
    """Try the kernel on two short samples, forward and backward; how to call it, or None."""
    lengths, window = (5, 3), 3 if windowed else None
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        values = torch.randn(1, count, sum(lengths), size, generator=generator)
        return values.to(device, dtype).requires_grad_()

    q, k, v = draw(heads), draw(key_heads), draw(key_heads)
    expected = []
    for qs, ks, vs in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True):
        n = qs.shape[2]
        mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        repeated = [x.repeat_interleave(heads // key_heads, 1).float() for x in (ks, vs)]
        expected.append(F.scaled_dot_product_attention(qs.float(), *repeated, attn_mask=mask).transpose(1, 2))
    want = torch.cat(expected, 1)
    want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    starts = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    modes: tuple[Mode, ...] = ("grouped", "repeated") if heads != key_heads else ("grouped",)
    for mode in modes:
        try:
            out = _run(q, k, v, starts, 5, size**-0.5, window, mode)
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue
        pairs = [(out, want), *zip(grads, want_grads, strict=True)]
        if all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs):
            return mode
    return None


def varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> Tensor | None:
    """Causal attention within each sample of a packed row by one kernel, ``[1, T, heads, d]``.

    None where the kernel cannot run.

    Args:
        q: ``[1, heads, T, d]``.
        k: ``[1, key heads, T, d]``.
        v: ``[1, key heads, T, d]``.
        starts: First position of each sample and the total, int32 ``[samples + 1]``.
        longest: Length of the longest sample.
        scale: Factor of the scores.
        window: Positions that a token sees, itself included; None is all before it.
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] != v.shape[-1]:
        return None
    with torch.enable_grad():
        mode = _mode(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[-1], window is not None)
    return None if mode is None else _run(q, k, v, starts, longest, scale, window, mode)
