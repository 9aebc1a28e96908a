"""Gradient checkpointing: recompute a block's activations in backward instead of keeping them."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from agilerl import recomputing

__all__ = ["blocks_of", "layer_type_of", "set_gradient_checkpointing", "text_blocks_of"]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated transformer blocks of ``model`` with their names, in order; outermost ones where they nest."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(
            name.startswith(f"{outer}.") for outer, _ in found
        ):
            found.append((name, module))
    return found


def text_blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that every token passes: of a vision-language model those of its language model only."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return blocks_of(model)
    inside = set(base.get_decoder().modules())
    return [(name, block) for name, block in blocks_of(model) if block in inside]


def layer_type_of(model: nn.Module, name: str, block: nn.Module) -> tuple[str, ...]:
    """Names a block answers to: its class, and its entry in the config's ``layer_types``."""
    names = [type(block).__name__.removeprefix("FSDP")]
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types = getattr(text_config, "layer_types", None)
    index = name.rsplit(".", 1)[-1]
    if layer_types and index.isdigit() and int(index) < len(layer_types):
        names.append(layer_types[int(index)])
    return tuple(names)


def set_gradient_checkpointing(
    model: nn.Module, enabled: bool, *, every_n_blocks: int = 1, skip_layer_types: Collection[str] = ()
) -> int:
    """Switch checkpointing of the model's blocks on or off; gradients do not change.

    Checkpoints are non-reentrant, so that frozen embeddings below trained adapters need no special care.

    Args:
        model: Any transformers model, with or without adapters.
        enabled: On or off.
        every_n_blocks: Checkpoint the first of every so many blocks.
        skip_layer_types: Class names or ``layer_types`` entries of blocks that are left alone.

    Returns:
        Number of blocks that are checkpointed.
    """
    switched = 0
    recompute = partial(checkpoint, use_reentrant=False, context_fn=recomputing.contexts)
    chosen = set()
    for index, (name, block) in enumerate(blocks_of(model)):
        if index % every_n_blocks == 0 and not set(layer_type_of(model, name, block)) & set(skip_layer_types):
            chosen.add(block)
    blocks = {block for _, block in blocks_of(model)}
    for module in model.modules():
        if not hasattr(module, "gradient_checkpointing"):
            continue
        # The backbone carries the flag too, for families whose loop checkpoints by itself.
        flag = enabled and (module not in blocks or module in chosen)
        module.gradient_checkpointing = flag  # type: ignore[assignment]
        module._gradient_checkpointing_func = recompute  # type: ignore[assignment]
        switched += flag and module in chosen
    if enabled and not blocks and not any(hasattr(module, "gradient_checkpointing") for module in model.modules()):
        warnings.warn(
            f"{type(model).__name__} has no blocks that can be checkpointed: training keeps all activations.",
            stacklevel=2,
        )
    return switched
