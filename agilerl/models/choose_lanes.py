"""Whether a model's micro-batches can be computed side by side (`agilerl.lanes`)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from agilerl import lanes
from agilerl.errors import ModelError
from agilerl.models.head import final_hidden_states, is_backbone_run
from agilerl.models.microbatch import Sample
from agilerl.models.modules import in_mode
from agilerl.models.packing import Packer, text_model

__all__ = ["choose_lanes"]

logger = logging.getLogger(__name__)

# Frequencies that a module changes while it runs.
_MOVING_ROTATIONS = frozenset({"dynamic", "longrope"})


def choose_lanes(model: nn.Module, packer: Packer) -> int:
    """How many micro-batches of the model to compute at once: 1, or 2 on a processor with threads for both.

    Two are chosen for plain language models on the packed path, whose modules keep nothing of a forward pass, and which
    draw nothing in training that does not come from a lane's own generator. That last one is tried out.
    """
    config: Any = text_model(model).config
    text = config.get_text_config()
    device = next(model.parameters()).device
    can_run = (
        packer.path == "packed"
        and device.type == "cpu"
        and lanes.pay_off(int(getattr(text, "hidden_size", 0)))
        and text is config
        and all(p.is_floating_point() for p in model.parameters())
        and not any(getattr(module, "rope_type", None) in _MOVING_ROTATIONS for module in model.modules())
        and not any("expert" in name.lower() or "router" in name.lower() for name, _ in model.named_modules())
        and is_backbone_run(model)
    )
    if not (can_run and _draws_in_lanes_only(model, packer)):
        return 1
    logger.info("Micro-batches are halved and computed two at a time.")
    return lanes.NUM_LANES


def _draws_in_lanes_only(model: nn.Module, packer: Packer) -> bool:
    micro = packer.collate([Sample(torch.tensor([1, 2, 3]), torch.ones(3))], "cpu")
    before = torch.get_rng_state()
    try:
        with in_mode(model, training=True), torch.no_grad():
            lanes.run([partial(_forward, model, packer, micro)])
        return torch.equal(before, torch.get_rng_state())
    except ModelError:
        return False
    finally:
        torch.set_rng_state(before)


def _forward(model: nn.Module, packer: Packer, micro: Any) -> None:
    with packer.running(model, micro):
        final_hidden_states(model, micro.inputs)
