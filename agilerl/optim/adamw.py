"""AdamW that keeps float32 masters of low-precision parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MasterAdamW"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class MasterAdamW(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) whose bfloat16 and float16 parameters are updated through a float32 copy.

    A typical update of a bfloat16 weight is smaller than half of its last place, so that updating in place rounds most of
    the training away. The copy (``state[p]["master"]``) and both moments are float32; the parameter is the rounded copy.
    Parameters in float32 or float64 are updated as ``torch.optim.AdamW`` does.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Make one step; see ``torch.optim.Optimizer.step``."""
        low = [p for g in self.param_groups for p in g["params"] if p.dtype in _LOW_PRECISION and p.grad is not None]
        rounded: list[tuple[Tensor, Tensor, Tensor]] = []
        for p in low:
            master = self.state[p].pop("master", None)
            is_current = master is not None and torch.equal(master.to(p.dtype), p.data)
            full = master if is_current else p.data.float()  # new weights written by somebody else win
            if not self.state[p]:
                del self.state[p]  # torch initialises the moments only where no state exists
            grad = p.grad
            assert grad is not None
            rounded.append((p, p.data, grad))
            p.grad = None
            p.data = full
            p.grad = grad.float()
        try:
            loss = super().step(closure)
        finally:
            for p, storage, grad in rounded:
                full = p.data
                self.state[p]["master"] = full
                p.grad = None
                p.data = storage.copy_(full)
                p.grad = grad
        return loss
