"""Between an agent's parts and a checkpoint's plain values, in both directions."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from agilerl.algorithms.core.registry import HyperparameterConfig, MutationRegistry
from agilerl.algorithms.core.resources import Resources
from agilerl.algorithms.core.settings import LLMSettings
from agilerl.checkpoint import AdapterContent, CheckpointContent, FullModel, same_base
from agilerl.distributed import Runtime
from agilerl.errors import CheckpointError
from agilerl.models.embeddings import stored_rows
from agilerl.models.head import unwrap
from agilerl.models.lora import config_differences
from agilerl.models.misfits import misfits
from agilerl.optim import CosineLRScheduleConfig

__all__ = [
    "capture",
    "constructor_arguments",
    "copy_plain",
    "copy_registry",
    "member_folders",
    "merged_settings",
    "restore_weights",
    "write_adapter",
]

logger = logging.getLogger(__name__)


# -- out ---------------------------------------------------------------------------------------------------------------


def capture(resources: Resources, runtime: Runtime, *, lora_only: bool, save_optimizer: bool) -> CheckpointContent:
    """Weights and moments as whole tensors on the main process's CPU; collective."""
    content = CheckpointContent("", base=dict(resources.base))
    model = resources.model
    if not lora_only:
        content.model_state = runtime.collect(model.state_dict())
    elif resources.adapters is None:
        inner = unwrap(model)
        content.full_model = FullModel.of(inner, runtime.collect(inner.state_dict()))
    else:
        name = getattr(unwrap(model).config, "_name_or_path", None)
        for role in resources.adapters.names:
            tensors = runtime.collect(resources.adapters.read(role))
            content.adapters[role] = AdapterContent.of(resources.adapters.config(role), tensors, name)
    if save_optimizer:
        if resources.optimizer is not None:
            content.optimizer = runtime.collect_optimizer(model, resources.optimizer.optimizer)
        else:
            content.optimizer = resources.optimizer_state
    return content


# -- in ----------------------------------------------------------------------------------------------------------------


def restore_weights(
    content: CheckpointContent, resources: Resources, runtime: Runtime, overwrite_reference: bool | None, path: str
) -> None:
    """Write a checkpoint's weights into the agent's parameters; nothing is written unless they fit.

    Raises:
        CheckpointError: Another base model, other LoRA settings, or tensors that do not match.
    """
    _check_kind(content, resources, path)
    adapters = resources.adapters
    if content.model_state is not None:
        _write_state(resources.model, content.model_state, runtime, path)
    elif content.full_model is not None:
        _write_state(unwrap(resources.model), content.full_model.tensors, runtime, path)
    elif "actor" not in content.adapters:
        raise CheckpointError(f"{path} holds no weights of an actor.")
    else:
        write_adapter(resources, runtime, "actor", content.adapters["actor"])
    if adapters is not None and "reference" in adapters.names:
        saved = content.adapters.get("reference")
        in_state = content.model_state is not None and any(".reference." in name for name in content.model_state)
        if saved is not None and not overwrite_reference:
            write_adapter(resources, runtime, "reference", saved)
        elif overwrite_reference or not in_state:
            adapters.copy("actor", "reference")


def _check_kind(content: CheckpointContent, resources: Resources, path: str) -> None:
    if resources.adapters is not None:
        if same_base(content.base.get("fingerprint"), resources.base.get("fingerprint")) is False:
            raise CheckpointError(
                f"{path} belongs to another base model ({content.base.get('name_or_path') or 'unnamed'}) than this agent's "
                f"({resources.base.get('name_or_path') or 'unnamed'}): their weights differ."
            )
        if content.full_model is not None:
            raise CheckpointError(
                f"{path} is a full fine-tune, and this agent trains adapters: load its folder 'actor' as the base model."
            )
    elif content.adapters:
        raise CheckpointError(
            f"{path} holds adapters, and this agent has none: give it the checkpoint's LoRA config "
            f"({_summary(content.adapters['actor'].config)})."
        )


def write_adapter(resources: Resources, runtime: Runtime, role: str, saved: AdapterContent) -> None:
    """Overwrite one adapter with a saved one of the same settings.

    Raises:
        CheckpointError: The LoRA settings or the tensors differ; the message names how.
    """
    adapters = resources.adapters
    assert adapters is not None
    config = _peft_config(saved.config)
    different = config_differences(config, adapters.config(role))
    if different:
        listed = "; ".join(
            f"{name} is {theirs!r} there and {mine!r} here" for name, (theirs, mine) in different.items()
        )
        raise CheckpointError(
            f"The checkpoint's LoRA config differs from this agent's: {listed}. Build the agent with the checkpoint's."
        )
    adapters.write(role, saved.tensors, assign=runtime.copy_into)


def _write_state(model: nn.Module, tensors: Mapping[str, Tensor], runtime: Runtime, path: str) -> None:
    """Copy a whole state dict into a model. A tied tensor may be stored under any one of its names."""
    current = model.state_dict()
    stored = {_memory(current[name]) for name in tensors if name in current}
    tied = {name for name, tensor in current.items() if _memory(tensor) in stored}
    if problems := misfits(current, tensors, may_lack=tied):
        raise CheckpointError(f"The weights in {path} do not fit this agent's network: {problems}.")
    for name, tensor in tensors.items():
        runtime.copy_into(current[name], tensor)


def _memory(tensor: Tensor) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)
    return (local.data_ptr(), tuple(tensor.shape)) if local.numel() else id(tensor)


def merged_settings(mine: LLMSettings, saved: Mapping[str, Any]) -> LLMSettings:
    """The agent's settings with the checkpoint's values of those that can change on a live agent."""
    values = _typed({name: saved[name] for name in mine.restorable if name in saved})
    return dataclasses.replace(mine, **values)


def constructor_arguments(content: CheckpointContent, path: Path) -> dict[str, Any]:
    """Arguments that rebuild the agent of a checkpoint on the machine at hand.

    Raises:
        CheckpointError: The base model has no name to find it by.
    """
    arguments = _typed(content.settings)
    arguments["fsdp_config"] = None  # how the model is laid out belongs to the run that loads it
    actor = content.adapters.get("actor")
    if actor is not None:
        arguments["lora_config"] = _peft_config(actor.config, training=True)
        arguments["lora_target_scope"] = None  # the saved targets are restricted to it already
    if content.full_model is not None:
        arguments["model_name"] = str(path / "actor")
    else:
        arguments["model_name"] = arguments.get("model_name") or content.base.get("name_or_path") or None
    if arguments["model_name"] is None:
        raise CheckpointError(
            f"{path} was trained on a network made in memory, which has no name to find it by: build the agent with that "
            "network and call load_checkpoint."
        )
    dtype = content.base.get("dtype")
    if dtype is not None:
        arguments["model_config"] = {"dtype": dtype, **(arguments.get("model_config") or {})}
    rows, stored = content.base.get("embedding_rows"), stored_rows(arguments["model_name"])
    if content.full_model is None and rows is not None and stored is not None and stored < rows:
        arguments["model_config"] = {"embedding_rows": rows, **(arguments.get("model_config") or {})}  # added tokens
    return arguments


def _typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings of a checkpoint as the objects that the constructor takes."""
    makers = {
        "cosine_lr_schedule_config": lambda v: CosineLRScheduleConfig(**v),
        "hp_config": HyperparameterConfig.from_dict,
        "lora_config": _peft_config,
        "quantization_config": BitsAndBytesConfig.from_dict,
    }
    return {n: makers[n](v) if n in makers and v is not None else v for n, v in settings.items()}


def _peft_config(fields: Mapping[str, Any], *, training: bool = False) -> PeftConfig:
    config = PeftConfig.from_peft_type(**fields)
    if training:
        config.inference_mode = False
        config.base_model_name_or_path = None  # PEFT fills in where the base is now, and warns about another name
    return config


def _summary(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={config.get(name)!r}" for name in ("r", "lora_alpha", "target_modules"))


# -- copies ------------------------------------------------------------------------------------------------------------


def copy_registry(registry: MutationRegistry) -> MutationRegistry:
    """A registry that can change without touching the original; hooks are the same callables or names."""
    duplicate = MutationRegistry(copy.deepcopy(registry.hp_config))
    duplicate.groups = list(registry.groups)
    duplicate.optimizers = list(registry.optimizers)
    duplicate.hooks = list(registry.hooks)
    return duplicate


def copy_plain(value: Any) -> Any:
    """An independent copy of plain containers and tensors."""
    return copy.deepcopy(value)


def member_folders(path: str | Path | None) -> list[Path]:
    """Folders of the members that a population checkpoint holds, in order; empty for any other."""
    folder = Path(path) / "population" if path is not None else None
    if folder is None or not folder.is_dir():
        return []
    return sorted((f for f in folder.iterdir() if f.name.isdigit()), key=lambda f: int(f.name))
