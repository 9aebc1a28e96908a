"""One tile of logits: negative log-likelihood and its gradient in the head's inputs, in as few buffers as possible."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from agilerl.hardware import is_better_wide, widened

__all__ = ["Plan", "Tile", "keeping_tile", "tile_gradient", "tile_nll"]

_local = threading.local()


class Plan(NamedTuple):
    """A plain linear head with the maps after it."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    """[V]."""
    scale: float
    softcap: float | None


class Tile(NamedTuple):
    """State between the value of a tile and its gradient."""

    nll: Tensor
    """[n] negative log-likelihoods, float32 or float64."""
    exps: Tensor
    """[n, V] exp(logit - max); consumed by ``tile_gradient``."""
    sums: Tensor
    """[n, 1] row sums of ``exps``."""
    slope: Tensor | None
    """[n, V] derivative of the softcap, where there is one."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays; everything else is reduced in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def keeping_tile() -> Iterator[None]:
    """Let the tiles that this thread computes inside the block use one array of each precision, one after the other.

    A processor's allocator gives an array of this size back to the system each time, which then clears every page of the
    next one: a sixth of the time of the product that fills it.
    """
    if hasattr(_local, "kept"):  # the outermost block keeps it
        yield
        return
    _local.kept = {}
    try:
        yield
    finally:
        del _local.kept


def _room(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """An array to write a tile into; None to make a new one."""
    kept: dict[torch.dtype, Tensor] | None = getattr(_local, "kept", None)
    if kept is None or device.type != "cpu" or torch.is_grad_enabled():
        return None
    if dtype not in kept or kept[dtype].numel() < rows * columns:
        kept.pop(dtype, None)  # before there is a second one
        kept[dtype] = torch.empty(rows * columns, dtype=dtype)
    return kept[dtype][: rows * columns].view(rows, columns)


def _cast(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """The tile in `dtype`: itself where it is so already, else written into the array kept for that precision."""
    if tile.dtype == dtype:
        return tile
    room = _room(tile.shape[0], tile.shape[1], dtype, tile.device)
    return tile.to(dtype) if room is None else room.copy_(tile)


def tile_nll(hidden: Tensor, targets: Tensor, plan: Plan, *, need_slope: bool) -> Tile:
    """Value of a tile: ``hidden`` [n, H], ``targets`` [n]."""
    weight = widened(plan.weight)
    rows = hidden.to(weight.dtype)
    room = _room(rows.shape[0], weight.shape[0], weight.dtype, weight.device)
    if plan.bias is None:
        raw = torch.mm(rows, weight.t(), out=room)
    else:
        raw = torch.addmm(plan.bias.to(weight.dtype), rows, weight.t(), out=room)
    logits = _cast(raw, accumulation_dtype(raw.dtype))  # [n, V]; the same tensor when it is float32 already
    del raw, weight, room
    if plan.scale != 1.0:
        logits.mul_(plan.scale)
    slope = None
    if plan.softcap is not None:
        logits.div_(plan.softcap).tanh_()
        if need_slope:
            slope = 1.0 - logits * logits
        logits.mul_(plan.softcap)
    top = logits.amax(dim=-1, keepdim=True)
    logits.sub_(top)
    chosen = logits.gather(1, targets.unsqueeze(1))
    exps = logits.exp_()
    sums = exps.sum(dim=-1, keepdim=True)
    return Tile((sums.log() - chosen).squeeze(1), exps, sums, slope)


def tile_gradient(tile: Tile, targets: Tensor, factors: Tensor, plan: Plan) -> Tensor:
    """Gradient [n, V] at the linear layer's output of ``sum(factors * nll)``; uses up the tile's buffers."""
    gradient = tile.exps.mul_(factors.unsqueeze(1) / tile.sums)
    gradient.scatter_add_(1, targets.unsqueeze(1), -factors.unsqueeze(1))
    if tile.slope is not None:
        gradient.mul_(tile.slope)
    if plan.scale != 1.0:
        gradient.mul_(plan.scale)
    # In half precision this overwrites the products, which nothing needs any more.
    return gradient if is_better_wide(plan.weight) else _cast(gradient, plan.weight.dtype)
