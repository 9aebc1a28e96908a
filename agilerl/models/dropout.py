"""Dropout by the positions that are dropped.

A mask of floats costs as much memory as the activation and, on a CPU, more time than the product that follows. With a
small rate it is cheaper to draw the gaps between dropped positions: in a row of independent draws they follow a geometric
distribution, so that the result is distributed exactly as a mask of independent draws would be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agilerl import lanes

__all__ = ["draw_dropped", "zero_dropped_"]

# Above this rate, or off the CPU, a mask of one byte per element is faster.
_SPARSE_RATE = 0.2


def draw_dropped(x: Tensor, rate: float) -> Tensor:
    """Draw, from the lane's generator or else the global one of the device, which elements of `x` are dropped.

    Returns:
        Flat positions in ascending order, int64, or a mask of the shape of `x` that is True where dropped.
    """
    count = x.numel()
    if x.device.type != "cpu" or rate > _SPARSE_RATE or rate < 1e-6 or count == 0:
        return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(rate, generator=lanes.generator())
    pieces: list[Tensor] = []
    last = -1
    while last < count - 1:
        uniform = torch.empty(_enough((count - 1 - last) * rate)).uniform_(
            2**-25, 1.0, generator=lanes.generator()
        )  # its logarithm is finite
        gaps = uniform.log_().mul_(1.0 / math.log1p(-rate)).to(torch.int64).add_(1)
        positions = gaps.cumsum_(0).add_(last)
        last = int(positions[-1])
        pieces.append(positions)
    positions = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return positions[: int(torch.searchsorted(positions, count))]


def _enough(mean: float) -> int:
    """Six standard deviations above the mean: a second round is possible, and as good as never needed."""
    return int(mean + 6 * math.sqrt(mean) + 16)


def zero_dropped_(x: Tensor, dropped: Tensor) -> Tensor:
    """Set the dropped elements of the contiguous `x` to zero, in place. Nothing is scaled."""
    if dropped.dtype == torch.bool:
        return x.masked_fill_(dropped, 0)
    x.view(-1).index_fill_(0, dropped, 0)
    return x
