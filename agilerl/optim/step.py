"""Clipping by the global norm, refusing what is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_gradients"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Args:
        parameters: Parameters whose ``.grad`` is scaled.
        norm: Their global 2-norm, over all ranks.
        max_norm: Largest norm allowed; None never clips.
    """
    if max_norm is None or norm <= max_norm:
        return
    scale = max_norm / norm
    by_kind: dict[type, list[Tensor]] = {}  # one fused call refuses to mix sharded and whole tensors
    for p in parameters:
        if p.grad is not None:
            by_kind.setdefault(type(p.grad), []).append(p.grad)
    for grads in by_kind.values():
        torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]
