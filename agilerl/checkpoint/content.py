"""What a checkpoint holds, as plain values: no agent, no module, nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from agilerl.checkpoint.plain import json_safe

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agilerl.checkpoint.tokenizer import TokenizerFiles

__all__ = ["AdapterContent", "CheckpointContent", "FullModel"]


@dataclass
class AdapterContent:
    """One adapter: its PEFT configuration and its tensors under the names of ``adapter_model.safetensors``."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, config: PeftConfig, tensors: Mapping[str, Tensor], base_name: str | None) -> AdapterContent:
        """Describe an adapter for loading elsewhere: in inference mode, on the base model ``base_name``."""
        fields = json_safe(config.to_dict(), "adapter config")
        fields |= {"inference_mode": True, "base_model_name_or_path": base_name or None}
        return cls(fields, dict(tensors))


@dataclass
class FullModel:
    """A whole model for an ordinary ``save_pretrained`` directory."""

    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> FullModel:
        """Describe ``model`` with these tensors (parameter and persistent buffer names, tied names allowed)."""
        config = model.config.to_dict()
        config["architectures"] = [type(model).__name__]
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            config["dtype"] = dtypes.pop()
        generation = getattr(model, "generation_config", None)
        return cls(
            json_safe(config, "model config"),
            None if generation is None else json_safe(generation.to_dict(), "generation config"),
            dict(tensors),
        )


@dataclass
class CheckpointContent:
    """Everything that makes an agent again, apart from the frozen base model.

    Attributes:
        algorithm: Name of the algorithm, such as ``"SFT"``.
        settings: The constructor's settings in plain containers.
        state: The agent's own state: counters, histories, generators, schedule.
        adapters: Role -> adapter.
        model_state: Full state dict of the actor (``lora_only=False``); kept in ``attributes.pt``.
        full_model: Full fine-tune (``lora_only=True``); an ordinary model directory ``actor/``.
        optimizer: Optimizer state keyed by parameter name; kept in ``attributes.pt``.
        base: Identity of the frozen base model: ``name_or_path`` and ``fingerprint``.
        tokenizer: The tokenizer, or its files when it comes out of a snapshot.
        training: State of the training loop around the agent; kept in ``training.pt``.
    """

    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, AdapterContent] = field(default_factory=dict)
    model_state: dict[str, Tensor] | None = None
    full_model: FullModel | None = None
    optimizer: dict[str, Any] | None = None
    base: dict[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | TokenizerFiles | None = None
    training: dict[str, Any] | None = None
