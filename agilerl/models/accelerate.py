"""The faster forms of a model's parts, put in place once after its adapters are attached."""

from __future__ import annotations

import logging

from torch import nn

from agilerl.models import fused_blocks, fused_lora, halves, rotary

__all__ = ["accelerate"]

logger = logging.getLogger(__name__)


def accelerate(model: nn.Module) -> dict[str, int]:
    """Let adapters, norms, gated units, rotations and, where it helps, half-precision products compute faster.

    Results are equal to rounding.

    Returns:
        How many modules of each kind were taken over.
    """
    counts = {
        "LoRA layers": fused_lora.install(model),
        **fused_blocks.install(model),
        "rotations": rotary.install(model),
        "products": halves.install(model),
    }
    logger.info("Faster forms: %s.", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none")
    return counts
