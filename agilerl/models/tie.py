"""Input embedding and head that share one weight."""

from __future__ import annotations

import re
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

__all__ = ["has_tied_head", "untie_for", "untie_head"]


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the head reads the weight of the input embedding."""
    head, embedding = _plain(model.get_output_embeddings()), _plain(model.get_input_embeddings())
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(embedding, "weight", None)


def untie_head(model: PreTrainedModel) -> None:
    """Give the head its own copy of the weight, and say so in the model's configuration."""
    head = _plain(model.get_output_embeddings())
    weight = head.weight
    head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    # What from_pretrained and save_pretrained go by, next to the configuration.
    path = next(name for name, module in model.named_modules() if module is head)
    for part in ("base_layer", "original_module"):
        path = path.removesuffix(f".{part}")
    model.all_tied_weights_keys.pop(f"{path}.weight", None)


def _plain(module: Any) -> Any:
    """The layer under PEFT's wrappers."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def untie_for(model: PreTrainedModel, config: Any) -> bool:
    """Untie the head where an adapter will sit on one of the two ends.

    PEFT would add the adapter's delta to the shared weight when merging, and so to the other end as well (peft issue 2777).
    With ``ensure_weight_tying`` PEFT keeps both ends equal, and nothing is done.

    Returns:
        Whether the head was untied.
    """
    if getattr(config, "ensure_weight_tying", False) or not has_tied_head(model):
        return False
    ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    if not any(_is_named(name, config) for name, module in model.named_modules() if id(module) in ends):
        return False
    untie_head(model)
    return True


def _is_named(name: str, config: Any) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        if targets != "all-linear" and re.fullmatch(targets, name):
            return True
        targets = ()
    entries = [*(targets or ()), *(config.modules_to_save or ())]
    return any(name == entry or name.endswith("." + entry) for entry in entries)
