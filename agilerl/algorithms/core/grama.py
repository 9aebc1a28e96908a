"""GraMa: how much gradient each output unit of a trained module gets (arXiv 2505.24061)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GramaCapture"]


class GramaCapture:
    """Collects the mean absolute gradient of each output unit while a training block is open.

    Hooks sit on the modules that own trainable parameters; a LoRA layer counts as one module, its output included.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in _trained_modules(model).items()
        ]

    def close(self) -> dict[str, Tensor]:
        """Remove the hooks and return module name -> Float [out], each divided by its module's mean."""
        for handle in self._handles:
            handle.remove()
        scores = {}
        for name, total in self._sums.items():
            mean = total / self._counts[name]
            overall = mean.mean()
            scores[name] = mean / overall if overall > 0 else torch.zeros_like(mean)
        return scores

    def _hook(self, name: str) -> Any:
        def on_forward(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._add(name, grad))

        return on_forward

    def _add(self, name: str, grad: Tensor) -> None:
        rows = grad.detach().abs().reshape(-1, grad.shape[-1]).double()
        total = rows.sum(0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + rows.shape[0]


def _trained_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that own trainable parameters; parameters inside an adapter layer belong to that layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, m in found.items() if isinstance(m, BaseTunerLayer))
        own = module.parameters(recurse=isinstance(module, BaseTunerLayer))
        if not inside and any(p.requires_grad for p in own):
            found[name] = module
    return found
