"""LoRA adapters on a model: where they go, how they start, and whether two configurations are the same."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agilerl.errors import ConfigError, ModelError
from agilerl.models.quantization import protect_quantized_layers, quantized_layers

__all__ = [
    "adapt_lora_config_for_model",
    "add_adapter",
    "adopt_adapter",
    "attach_lora",
    "config_differences",
]

_LOG = logging.getLogger(__name__)

_IRRELEVANT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
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
    _check_targets(model, config)
    protect_quantized_layers(model)
    with _own_seed(seed), _quiet():
        peft_model = get_peft_model(model, config, adapter_name=name)
    _check_trainable(peft_model)  # type: ignore[arg-type]
    return peft_model  # type: ignore[return-value]


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
    """Move an adapter to another name: same tensors, same order."""
    for module in peft_model.modules():
        for holder_name in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())):
            holder = getattr(module, holder_name, None)
            if isinstance(holder, dict | nn.ModuleDict | nn.ParameterDict) and old in holder:
                item = holder[old]
                del holder[old]
                holder[new] = item
        for own in ("_active_adapter", "merged_adapters"):
            value = module.__dict__.get(own)
            if value == old:
                module.__dict__[own] = new
            elif isinstance(value, list):
                module.__dict__[own] = [new if item == old else item for item in value]
    tuner = peft_model.base_model
    for holder in {id(c): c for c in (peft_model.peft_config, tuner.peft_config)}.values():  # type: ignore[union-attr]
        holder[new] = holder.pop(old)
    tuner.active_adapter = new
    peft_model.active_adapter = new


def adapt_lora_config_for_model(
    model: nn.Module, lora_config: LoraConfig, lora_target_scope: str | None = None
) -> LoraConfig:
    """A copy of the configuration whose targets lie under ``lora_target_scope``.

    Works with lists of names, ``"all-linear"`` and regular expressions. The scope is matched by whole path components:
    ``lay`` does not match ``layers``; ``"language_model"`` also means the model's decoder where its path is called
    otherwise.

    Raises:
        ModelError: No such scope, or no target inside it; candidates are listed.
    """
    config = copy.deepcopy(lora_config)
    if lora_target_scope is None:
        return config
    prefix = _scope_pattern(model, lora_target_scope)
    inside = [name for name, _ in _linear_modules(model) if re.match(prefix, name)]
    targets = config.target_modules
    if targets is None:
        raise ConfigError(
            "lora_target_scope needs target_modules (a list of names, 'all-linear' or a regular expression)."
        )
    if targets == "all-linear":
        head = _head_name(model)
        leaves = sorted({name.rpartition(".")[2] for name in inside if name != head})
        pattern = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, leaves))})"
    elif isinstance(targets, str):
        pattern = rf"(?:{targets})"
    else:
        _check_named(
            targets, [name for name, _ in model.named_modules() if re.match(prefix, name)], inside, "target_modules"
        )
        pattern = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(targets)))})"
    config.target_modules = rf"(?={prefix}){pattern}"
    if not inside or not any(re.fullmatch(config.target_modules, name) for name, _ in model.named_modules()):
        raise ModelError(
            f"No layer under the scope {lora_target_scope!r} matches target_modules={targets!r}; "
            f"candidates there are {_leaves(inside)}."
        )
    return config


def config_differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two adapter configurations mean different things: field -> (value of ``a``, value of ``b``).

    Dropout, exclude lists, initialisation, paths and inference mode are not compared.
    """
    left, right = _fields(a), _fields(b)
    names = sorted((left.keys() | right.keys()) - _IRRELEVANT)
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def _fields(config: Any) -> dict[str, Any]:
    values = dict(config) if isinstance(config, dict) else config.to_dict()
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
    """Hide what PEFT itself causes: it reads a property that transformers 5 has renamed (peft 0.21)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        yield


def _linear_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers that LoRA can adapt, by path; embeddings are left out."""
    quantized = {id(module) for _, module in quantized_layers(model)}
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) or id(module) in quantized
    ]


def _head_name(model: nn.Module) -> str | None:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _leaves(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Every entry must match something: a typo in a list of names would otherwise leave layers untrained in silence."""
    modules = [name for name, _ in model.named_modules() if name]
    linear = [name for name, _ in _linear_modules(model)]
    targets = config.target_modules
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, name) for name in modules):
            raise ModelError(f"target_modules={targets!r} matches no layer; candidates are {_leaves(linear)}.")
    elif targets:
        _check_named(targets, modules, linear, "target_modules")
    if config.modules_to_save:
        _check_named(config.modules_to_save, modules, modules, "modules_to_save")
    if parameters := getattr(config, "target_parameters", None):
        names = [name for name, parameter in model.named_parameters() if parameter.ndim in (2, 3)]
        _check_named(parameters, names, [n for n in names if not n.endswith(".weight")] or names, "target_parameters")


def _check_named(entries: Iterable[str], names: list[str], candidates: list[str], field: str) -> None:
    missing = [entry for entry in entries if not any(n == entry or n.endswith("." + entry) for n in names)]
    if missing:
        raise ModelError(
            f"{field}: {', '.join(map(repr, sorted(missing)))} matches no layer of the model; "
            f"candidates are {_leaves(candidates)}."
        )


def _check_trainable(peft_model: PeftModel) -> None:
    if not any(parameter.requires_grad for parameter in peft_model.parameters()):
        raise ModelError("The adapter has no trainable parameter.")


def _scope_pattern(model: nn.Module, scope: str) -> str:
    """Regular expression of paths that lie under the scope."""
    names = [name for name, _ in model.named_modules()]
    pattern = rf"(?:.*\.)?{re.escape(scope)}\."
    if any(re.match(pattern, name) for name in names):
        return pattern
    if scope == "language_model" and isinstance(model, PreTrainedModel):
        decoder = model.get_decoder()
        path = next((name for name, module in model.named_modules() if module is decoder and name), None)
        if path is not None:
            return rf"{re.escape(path)}\."
    scopes = sorted({part for name in names for part in name.split(".")[:-1] if part and not part.isdigit()})
    raise ModelError(f"The model has no part called {scope!r}; candidates are {', '.join(scopes)}.")
