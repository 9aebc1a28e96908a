"""4- and 8-bit base models through bitsandbytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agilerl.errors import ConfigError
from agilerl.optional import require

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

__all__ = [
    "build_bnb_quantization_config",
    "is_quantized",
    "keep_head_unquantized",
    "num_parameters",
    "protect_quantized_layers",
    "quantized_layers",
]

_NF4 = frozenset({"nf4", "4bit", "4-bit", "bnb-4bit", "bnb_4bit"})
_INT8 = "int8"
_NONE = "none"


def build_bnb_quantization_config(spec: Any) -> BitsAndBytesConfig | None:
    """Turn a short description into a ``BitsAndBytesConfig``.

    Args:
        spec: None or ``"none"``; ``"int8"``; ``"nf4"`` (also ``"4bit"``, ``"4-bit"``, ``"bnb-4bit"``, ``"bnb_4bit"``):
            NF4 with double quantisation, bfloat16 compute and storage (what FSDP2 can shard); a dict of keyword
            arguments; or a ready ``BitsAndBytesConfig``, which is returned as it is.

    Raises:
        ConfigError: An unknown name, or keyword arguments that ``BitsAndBytesConfig`` does not take.
        TypeError: Neither of the types above.
    """
    from transformers import BitsAndBytesConfig

    if spec is None or isinstance(spec, BitsAndBytesConfig):
        return spec
    if isinstance(spec, str):
        name = spec.strip().lower()
        if name == _NONE:
            return None
        if name == _INT8:
            return BitsAndBytesConfig(load_in_8bit=True)
        if name in _NF4:
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
                bnb_4bit_quant_storage=torch.bfloat16,
            )
        allowed = ", ".join(sorted({_NONE, _INT8} | _NF4))
        raise ConfigError(f"Unknown quantisation {spec!r}; allowed are {allowed}, a dict or a BitsAndBytesConfig.")
    if isinstance(spec, dict):
        return _from_dict(spec)
    raise TypeError(
        f"A quantisation is None, 'nf4', 'int8', a dict or a BitsAndBytesConfig, not {type(spec).__name__}."
    )


def _from_dict(spec: dict[str, Any]) -> BitsAndBytesConfig:
    from transformers import BitsAndBytesConfig

    known = set(BitsAndBytesConfig().to_dict()) - {"quant_method", "_load_in_4bit", "_load_in_8bit"}
    unknown = sorted(set(spec) - known - {"quant_method", "_load_in_4bit", "_load_in_8bit"})
    if unknown:
        raise ConfigError(f"Unknown quantisation setting {', '.join(unknown)}; allowed are {', '.join(sorted(known))}.")
    kwargs = {name: value for name, value in spec.items() if name in known}
    if not (kwargs.get("load_in_4bit") or kwargs.get("load_in_8bit")):
        raise ConfigError("A quantisation dict must set load_in_4bit or load_in_8bit to True.")
    try:
        return BitsAndBytesConfig(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The quantisation settings {kwargs} do not fit together: {error}.") from None


def keep_head_unquantized(config: BitsAndBytesConfig, head_names: list[str]) -> BitsAndBytesConfig:
    """A copy of the caller's config that leaves the head alone, so that loss and log-probabilities stay exact."""
    config = copy.deepcopy(config)
    skipped = list(config.llm_int8_skip_modules or [])
    config.llm_int8_skip_modules = skipped + [name for name in head_names if name not in skipped]
    return config


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each bitsandbytes linear layer, without importing bitsandbytes for models that have none."""
    for name, module in model.named_modules():
        if any(
            cls.__module__.startswith("bitsandbytes.") and cls.__name__ in {"Linear4bit", "Linear8bitLt"}
            for cls in type(module).__mro__
        ):
            yield name, module


def is_quantized(model: nn.Module) -> bool:
    """Whether any linear layer of the model is stored in 4 or 8 bit."""
    return next(quantized_layers(model), None) is not None


def num_parameters(model: nn.Module) -> int:
    """Number of weights; those that are packed into fewer numbers count as what they stand for."""
    return sum(
        math.prod(getattr(getattr(parameter, "quant_state", None), "shape", None) or parameter.shape)
        for parameter in model.parameters()
    )


def protect_quantized_layers(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in place during evaluation.

    On CPUs with AVX512-BF16 an inference forward rewrites the weight into a layout for which there is no backward:
    training afterwards leaves every adapter without gradient and says nothing.
    """
    for _, module in quantized_layers(model):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def require_bitsandbytes() -> None:
    """Import bitsandbytes, or say how to install it."""
    require("bitsandbytes", "quant", "Loading a model in 4 or 8 bit")
