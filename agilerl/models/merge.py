"""Fold an adapter into the weights under it, and measure what that changed."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor
from transformers import PreTrainedModel

from agilerl.errors import ModelError
from agilerl.models.head import unwrap
from agilerl.models.modules import probing
from agilerl.models.quantization import is_quantized, protect_quantized_layers
from agilerl.models.tie import has_tied_head, untie_head

__all__ = ["Merged", "merge_adapter"]

_LOG = logging.getLogger(__name__)
_PROBE_TOKENS = 24
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Merged:
    """An ordinary model without adapters, and how far its logits moved on a few random tokens."""

    model: PreTrainedModel
    error: float
    """Largest difference of a logit, relative to the largest logit."""


def merge_adapter(model: PeftModel, role: str | None = None) -> Merged:
    """Fold one adapter into its base; the ``PeftModel`` is used up.

    In float32 the result is the adapted model up to rounding (checked, every kind of adapter). A 16-bit base rounds the
    summed weights once. A 4- or 8-bit base is quantised again, which costs accuracy: there is a warning with the
    measured error; load the base in full precision and put the adapter on that to avoid it.

    Args:
        model: The adapted model, its adapters not merged.
        role: Adapter to fold in; None takes the active one.

    Raises:
        ModelError: The adapter cannot be merged, or the merged model differs.
    """
    role = role or model.active_adapters[0]
    if role not in model.peft_config:
        raise ModelError(f"There is no adapter {role!r}; the model has {', '.join(model.peft_config)}.")
    model.set_adapter(role)
    base: Any = unwrap(model)
    quantized = is_quantized(base)
    before = _probe(model, base)
    _untie_adapted(base)
    try:
        with warnings.catch_warnings():
            if quantized:  # PEFT warns once per layer; ours comes once, with a number
                warnings.filterwarnings("ignore", message="Merge lora module to")
            else:
                _merge_halves(base, role)
                warnings.filterwarnings("ignore", message="All adapters are already merged")
            merged: Any = model.merge_and_unload(safe_merge=True, adapter_names=[role])
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"The adapter {role!r} cannot be merged: {str(error).splitlines()[0]}") from None
    protect_quantized_layers(merged)
    error = _difference(_probe(merged, merged), before)
    _judge(error, merged.dtype, quantized)
    return Merged(merged, error)


def _judge(error: float, dtype: torch.dtype, quantized: bool) -> None:
    if quantized:
        warnings.warn(
            f"The adapter was merged into quantised weights: logits moved by {error:.2%} of the largest one. "
            "Merge into the full-precision base model to keep what was trained.",
            UserWarning,
            stacklevel=3,
        )
    elif dtype in (torch.float32, torch.float64) and not error <= _TOLERANCE:
        raise ModelError(f"The merged model is not the adapted one: logits differ by {error:.2%} of the largest one.")
    else:
        _LOG.info("Merged: logits moved by %.2g of the largest one.", error)


def _untie_adapted(base: PreTrainedModel) -> None:
    """Separate head and embedding where only one of them carries a delta, and record it in the configuration."""
    head: Any = base.get_output_embeddings()
    ends = (head, base.get_input_embeddings())
    if not any(isinstance(end, LoraLayer | ModulesToSaveWrapper) for end in ends):
        return
    configs: dict[str, Any] = getattr(base, "peft_config", {})
    if any(getattr(config, "ensure_weight_tying", False) for config in configs.values()):
        return
    if has_tied_head(base):
        untie_head(base)


def _merge_halves(base: PreTrainedModel, role: str) -> None:
    """Merge layers of 16 bit in float32, one at a time: PEFT would round the delta before it adds it."""
    for module in base.modules():
        if isinstance(module, LoraLayer):
            layer: Any = module.get_base_layer()
            dtype = next(layer.parameters()).dtype
            if dtype in (torch.bfloat16, torch.float16):
                layer.float()
                module.merge(safe_merge=True, adapter_names=[role])  # type: ignore[attr-defined]
                layer.to(dtype)


def _probe(model: Any, base: Any) -> Tensor:
    device = next(base.parameters()).device
    vocab = base.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    with probing(base):
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.double()


def _difference(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
