"""Which layers a LoRA configuration names: every entry must match, and a scope narrows it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as _DEFAULT_TARGETS
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agilerl.errors import ConfigError, ModelError
from agilerl.models.quantization import is_quantized, quantized_layers

__all__ = ["adapt_lora_config_for_model", "check_targets", "leaf_names"]

_ADAPTABLE = (nn.Linear, nn.Embedding, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


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
    _narrow(model, config, prefix, inside)
    if not any(check_target_module_exists(config, name) for name, _ in model.named_modules()):
        raise ModelError(
            f"No layer under the scope {lora_target_scope!r} matches target_modules={targets!r}; "
            f"candidates there are {leaf_names(inside)}."
        )
    return config


def _narrow(model: nn.Module, config: LoraConfig, prefix: str, inside: list[str]) -> None:
    """Restrict the targets to paths that start with the pattern ``prefix``."""
    targets = config.target_modules
    if config.layers_to_transform is not None and not isinstance(targets, str):
        matching = [name for name, _ in model.named_modules() if check_target_module_exists(config, name) is True]
        config.target_modules = [name for name in matching if re.match(prefix, name)]
        config.layers_to_transform = config.layers_pattern = None  # they are not read with regular expressions
        return
    if targets == "all-linear":
        head = _head_name(model)
        leaves = {name.rpartition(".")[2] for name in inside if name != head}
        pattern = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(leaves)))})"
    elif isinstance(targets, str):
        pattern = rf"(?:{targets})"
    else:
        under = [name for name, _ in model.named_modules() if re.match(prefix, name)]
        _check_named(targets or (), under, inside, "target_modules")
        pattern = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(targets or ())))})"
    config.target_modules = rf"(?={prefix}){pattern}"


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


def check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """Every entry must match something: a typo in a list of names would otherwise leave layers untrained in silence."""
    modules = [name for name, _ in model.named_modules() if name]
    linear = [name for name, _ in _linear_modules(model)]
    targets = config.target_modules
    if not targets and not config.target_parameters:
        _check_none_named(model, config, linear)
    if isinstance(targets, str):
        if targets != "all-linear" and not any(re.fullmatch(targets, name) for name in modules):
            raise ModelError(f"target_modules={targets!r} matches no layer; candidates are {leaf_names(linear)}.")
    elif targets:
        _check_named(targets, modules, linear, "target_modules")
    if targets and targets != "all-linear":
        for name, module in model.named_modules():
            if check_target_module_exists(config, name) is True or (
                isinstance(targets, str) and re.fullmatch(targets, name)
            ):
                _check_adaptable(name, module, linear)
    if config.modules_to_save:
        _check_named(config.modules_to_save, modules, modules, "modules_to_save")
    if parameters := config.target_parameters:
        names = [name for name, parameter in model.named_parameters() if parameter.ndim in (2, 3)]
        _check_named(parameters, names, [n for n in names if not n.endswith(".weight")] or names, "target_parameters")


def _check_none_named(model: PreTrainedModel, config: LoraConfig, candidates: list[str]) -> None:
    if config.target_modules is not None and not config.trainable_token_indices:
        raise ModelError(
            f"target_modules is empty, so nothing would be adapted; name layers ({leaf_names(candidates)}) or use "
            "'all-linear'."
        )
    model_type = getattr(model.config, "model_type", None)
    if config.target_modules is None and model_type not in _DEFAULT_TARGETS:
        raise ModelError(
            f"target_modules is needed for model type {model_type!r}; candidates are {leaf_names(candidates)}, or "
            "'all-linear'."
        )


def _check_adaptable(name: str, module: nn.Module, candidates: list[str]) -> None:
    if not isinstance(module, _ADAPTABLE) and not is_quantized(module):
        raise ModelError(
            f"target_modules: {name} is a {type(module).__name__}, which LoRA cannot adapt; "
            f"candidates are {leaf_names(candidates)}."
        )


def _check_named(entries: Iterable[str], names: list[str], candidates: list[str], field: str) -> None:
    missing = [entry for entry in entries if not any(n == entry or n.endswith("." + entry) for n in names)]
    if missing:
        raise ModelError(
            f"{field}: {', '.join(map(repr, sorted(missing)))} matches no layer of the model; "
            f"candidates are {leaf_names(candidates)}."
        )


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


def leaf_names(names: Iterable[str]) -> str:
    """Last components of paths, each once, for a sentence."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"
