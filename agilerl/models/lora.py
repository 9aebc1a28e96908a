"""LoRA adapters on a model: where they go, how they start, and whether two configurations are the same."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from agilerl.errors import ConfigError, ModelError
from agilerl.models.embeddings import check_token_rows
from agilerl.models.head import unwrap
from agilerl.models.quantization import is_quantized, protect_quantized_layers
from agilerl.models.targets import adapt_lora_config_for_model, check_targets, leaf_names
from agilerl.models.tie import untie_for

__all__ = [
    "add_adapter",
    "adopt_adapter",
    "attach_lora",
    "config_differences",
    "describe_adapters",
]

_LOG = logging.getLogger(__name__)

_IRRELEVANT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "lora_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        "loftq_config",
        "eva_config",
        "corda_config",
    }
)
"""Fields that do not change what stored adapter weights mean."""


_SPLITTING = ("pissa", "olora")
"""Starts that move a part of the base weights into the adapter, which then means something on that base only."""


def attach_lora(
    model: PreTrainedModel, lora_config: LoraConfig, *, seed: int, scope: str | None = None, name: str = "actor"
) -> PeftModel:
    """Put fresh adapters on a plain model.

    The caller's configuration is copied; the adapter is drawn from its own seed and the global generators are left
    alone. Its delta is exactly zero at the start. Adapter weights are float32 over 16-bit bases.

    Args:
        model: A causal LM without adapters; its modules are replaced in place.
        lora_config: Where and how to adapt.
        seed: Seed of the initialisation.
        scope: Path component that adapters must lie under, such as ``"language_model"``.
        name: Name of the adapter.

    Raises:
        ModelError: The model has adapters already, or a target matches nothing.
    """
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ModelError("The model has adapters already; pass the PeftModel without a lora_config, or merge it first.")
    config = adapt_lora_config_for_model(model, lora_config, scope)
    check_targets(model, config)
    check_token_rows(model, config)
    protect_quantized_layers(model)
    if untie_for(model, config):
        _LOG.info("The head was tied to the input embedding; it got its own weight, so that the adapter can be merged.")
    config.inference_mode = False
    _check_initialisation(model, config)
    with _own_seed(seed), _quiet():
        peft_model = _wrap(model, config, name)
    _check_trainable(peft_model)
    _LOG.info("Adapters: %s.", describe_adapters(peft_model))
    return peft_model


def _wrap(model: PreTrainedModel, config: LoraConfig, name: str) -> PeftModel:
    try:
        return get_peft_model(model, config, adapter_name=name)  # type: ignore[return-value]
    except (
        ValueError,
        TypeError,
    ) as error:  # every target exists, so it is one of the narrowing fields or their combination
        raise ModelError(f"PEFT cannot put this LoRA configuration on the model: {error}") from None


def _check_initialisation(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuse starting values that a saved adapter cannot be rebuilt from."""
    start = config.init_lora_weights
    if start in _SPLITTING and is_quantized(model):
        raise ConfigError(
            f"init_lora_weights={start!r} changes the base weights, which cannot be done in 4 or 8 bit; use True."
        )
    if isinstance(start, str) and start.startswith("pissa_niter_"):
        raise ConfigError(
            f"init_lora_weights={start!r} draws at random, so the base weights that it changes cannot be rebuilt when the "
            "adapter is loaded; use 'pissa'."
        )
    if start in ("loftq", "eva", "corda"):
        raise ConfigError(
            f"init_lora_weights={start!r} is computed from data or quantised weights beforehand; use 'pissa', 'olora', "
            "'orthogonal', 'gaussian' or True."
        )


def describe_adapters(peft_model: PeftModel) -> str:
    """What is adapted, in a line: number and names of layers, the state of the head, trainable parameters."""
    layers = [name for name, module in peft_model.named_modules() if isinstance(module, LoraLayer)]
    head: Any = unwrap(peft_model).get_output_embeddings()
    is_trained = any(weight.requires_grad for weight in head.parameters())
    status = "adapted" if isinstance(head, LoraLayer) else "trained in full" if is_trained else "frozen"
    count = sum(parameter.numel() for parameter in peft_model.parameters() if parameter.requires_grad)
    return f"{len(layers)} adapted layers ({leaf_names(layers)}), head {status}, {count:,} trainable parameters"


def add_adapter(model: PeftModel, config: Any, *, seed: int, name: str) -> None:
    """Add one more adapter to a ``PeftModel``, drawn from its own seed."""
    with _own_seed(seed), _quiet():
        model.add_adapter(name, copy.deepcopy(config))


def adopt_adapter(peft_model: PeftModel, name: str = "actor") -> PeftModel:
    """Make the single adapter of an existing ``PeftModel`` the trainable ``actor``.

    Raises:
        ModelError: There is not exactly one adapter, or it is merged or not a LoRA adapter.
    """
    names = list(peft_model.peft_config)
    if len(names) != 1:
        raise ModelError(
            f"The PeftModel has {len(names)} adapters ({', '.join(names)}); delete all but the one to train."
        )
    config = peft_model.peft_config[names[0]]
    if not isinstance(config, LoraConfig):
        raise ModelError(f"The PeftModel holds a {type(config).__name__}; only LoRA adapters can be trained here.")
    if any(module.merged for module in peft_model.modules() if isinstance(module, BaseTunerLayer)):
        raise ModelError("The adapter of the PeftModel is merged into its base; call unmerge_adapter() first.")
    protect_quantized_layers(peft_model)
    if names[0] != name:
        _rename(peft_model, names[0], name)
    config.inference_mode = False
    peft_model.set_adapter(name)
    _check_trainable(peft_model)
    return peft_model


def _rename(peft_model: PeftModel, old: str, new: str) -> None:
    """Move an adapter to another name: the same tensors, in the same order."""
    for module in peft_model.modules():
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        holders = [value for key, value in module.__dict__.items() if not key.startswith("_")]
        for holder in [*holders, *module._modules.values()]:
            if isinstance(holder, dict | nn.ModuleDict | nn.ParameterDict | BufferDict) and old in holder:
                item: Any = holder[old]
                del holder[old]
                holder[new] = item
        state = module.__dict__
        active = state["_active_adapter"]
        state["_active_adapter"] = new if active == old else [new if item == old else item for item in active]
        if old in (known := state.get("_adapters", set())):
            known.remove(old)
            known.add(new)
    tuner: Any = peft_model.base_model
    for configs in {id(each): each for each in (peft_model.peft_config, tuner.peft_config)}.values():
        configs[new] = configs.pop(old)
    tuner.active_adapter = new
    peft_model.active_adapter = new


def config_differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two adapter configurations mean different things: field -> (value of ``a``, value of ``b``).

    Dropout, exclude lists, paths and inference mode are not compared; initialisation only where it changes the base.
    """
    left, right = _fields(a), _fields(b)
    names = sorted((left.keys() | right.keys()) - _IRRELEVANT)
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def _fields(config: Any) -> dict[str, Any]:
    values = dict(config) if isinstance(config, dict) else config.to_dict()
    start = values.get("init_lora_weights")
    values["base_split_by"] = start if start in _SPLITTING else None
    return {name: _canonical(value) for name, value in values.items()}


def _canonical(value: Any) -> Any:
    """Order, container type and emptiness of name lists mean nothing."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(map(str, value)) or None
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()} or None
    return getattr(value, "value", value)  # PEFT's enums are stored as their values


@contextmanager
def _own_seed(seed: int) -> Iterator[None]:
    """Draw from ``seed``; the global generators of all devices are put back afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what says nothing to users: a property renamed in transformers 5 (peft 0.21), and the layout of Conv1D."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield


def _check_trainable(peft_model: PeftModel) -> None:
    if not any(parameter.requires_grad for parameter in peft_model.parameters()):
        raise ModelError("The adapter has no trainable parameter; set inference_mode=False in its configuration.")
