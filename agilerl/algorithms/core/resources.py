"""What an agent rebuilds from its settings: the network with its adapters, and what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn

from agilerl.algorithms.core.settings import LLMSettings
from agilerl.checkpoint import base_fingerprint
from agilerl.distributed import Runtime
from agilerl.errors import ConfigError
from agilerl.models import moe
from agilerl.models.accelerate import accelerate
from agilerl.models.adapters import Adapters
from agilerl.models.build import load_base_model, resolve_name
from agilerl.models.choose_lanes import choose_lanes
from agilerl.models.embeddings import embedding_rows
from agilerl.models.head import Head, find_head, unwrap
from agilerl.models.lora import adopt_adapter, attach_lora, config_differences
from agilerl.models.segments import Packer, choose_packer
from agilerl.models.share import share_base
from agilerl.optim import OptimizerWrapper

__all__ = ["Resources", "build_actor", "build_optimizer"]


@dataclass
class Resources:
    """The network of an agent and what was found out about it.

    Attributes:
        model: The actor, ready to train or not yet (see ``is_wrapped``).
        adapters: Roles of its adapters; None for a full fine-tune.
        head: Its language-model head.
        packer: How its rows become micro-batches.
        optimizer: None until the models are wrapped.
        base: Identity of the base model: name or path, fingerprint, dtype.
        is_wrapped: Whether the runtime has placed or sharded the model.
        optimizer_state: Moments by parameter name, kept while the models are unwrapped.
    """

    model: nn.Module
    adapters: Adapters | None
    head: Head
    packer: Packer
    base: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerWrapper | None = None
    is_wrapped: bool = False
    optimizer_state: dict[str, Any] | None = None

    @classmethod
    def of(cls, model: nn.Module, settings: LLMSettings, base: dict[str, Any], *, is_alone: bool) -> Resources:
        """Inspect a freshly built model on the base described by ``base``; alone, it shares its work with no process."""
        packer = choose_packer(model, positions_from_mask=settings.calc_position_embeddings)
        if is_alone:
            packer = replace(packer, num_lanes=choose_lanes(model, packer))
        adapters = Adapters(model) if isinstance(model, PeftModel) else None
        return cls(model, adapters, find_head(model), packer, base)

    def shared_copy(self, runtime: Runtime) -> Resources:
        """A second model on the same frozen tensors; its trainable tensors are copies. Nothing is probed again."""
        model = runtime.clone_model(self.model) if self.is_wrapped else None
        return self.around(share_base(self.model) if model is None else model)

    def around(self, model: nn.Module) -> Resources:
        """The same findings about another model object of the same kind; without optimizer."""
        head = replace(self.head, module=unwrap(model).get_output_embeddings())
        adapters = Adapters(model) if isinstance(model, PeftModel) else None
        return Resources(model, adapters, head, self.packer, self.base, is_wrapped=self.is_wrapped)


def build_actor(
    settings: LLMSettings,
    network: nn.Module | None,
    runtime: Runtime,
    *,
    add_adapters: bool = True,
    will_wrap: bool = True,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load or take the network, and attach or adopt its adapters.

    Args:
        settings: The agent's settings.
        network: A causal LM or ``PeftModel`` of the caller; None loads ``settings.model_name``.
        runtime: Where the model will run; a sharding one may leave the loading of weights to its ``prepare``.
        will_wrap: Whether ``runtime.prepare`` follows at once.
        add_adapters: False leaves a plain network plain (for a clone, whose adapters come from its parent).

    Returns:
        The model, and the identity of its base: taken before an adapter's initialisation can change it.

    Raises:
        ConfigError: Arguments contradict each other.
        ModelError: The model or the LoRA targets cannot be found.
    """
    network = _base_network(settings, network, runtime, whole=not will_wrap)
    base = _identity(network, runtime, settings.model_name)
    with runtime.adding_adapters(network):
        if isinstance(network, PeftModel):
            model: nn.Module = _adopted(network, settings)
        elif settings.lora_config is not None and add_adapters:
            model = attach_lora(
                unwrap(network), settings.lora_config, seed=settings.seed, scope=settings.lora_target_scope
            )
        else:
            model = network
        wants_reference = settings.use_separate_reference_adapter
        if isinstance(model, PeftModel) and wants_reference and "reference" not in model.peft_config:
            adapters = Adapters(model)
            adapters.add("reference", like="actor", seed=settings.seed)
            adapters.copy("actor", "reference")  # the reference is the policy that training starts from
    if not isinstance(model, PeftModel) and (needing := settings.needing_adapter()):
        raise ConfigError(f"{', '.join(needing)} needs a lora_config: without one the whole network is trained.")
    accelerate(model)
    num_experts = moe.install(model, recompute=settings.moe_lora_recompute)
    if settings.moe_lora_recompute is not None and not num_experts:
        raise ConfigError(
            "moe_lora_recompute needs LoRA on routed experts that are packed into one parameter: name them in "
            "lora_config.target_parameters, such as 'experts.gate_up_proj' and 'experts.down_proj'."
        )
    return model, base


def _base_network(settings: LLMSettings, network: nn.Module | None, runtime: Runtime, *, whole: bool) -> nn.Module:
    if network is None:
        if settings.model_name is None:
            raise ConfigError("Give a network (actor_network) or the name of one (model_name); found neither.")
        name, config = settings.model_name, settings.model_config
        quantisation = settings.quantization_config
        load = partial(load_base_model, name, model_config=config, quantization_config=quantisation)
        whole = whole or quantisation is not None or _starts_from_base_weights(settings.lora_config)
        return runtime.load_base(resolve_name(name), load, needs_weights=whole, **(config or {}))
    if settings.model_config is not None:
        raise ConfigError("model_config goes with model_name: an actor_network is built already.")
    if settings.quantization_config is not None and getattr(unwrap(network), "quantization_method", None) is None:
        raise ConfigError(
            "quantization_config was given with an unquantised actor_network; give model_name instead, or load the "
            "network with this quantization_config."
        )
    return network


def _adopted(network: PeftModel, settings: LLMSettings) -> PeftModel:
    model = adopt_adapter(network)
    if settings.lora_config is not None:
        different = config_differences(model.peft_config["actor"], settings.lora_config)
        if different:
            listed = ", ".join(f"{name}: {mine!r} here, {given!r} given" for name, (mine, given) in different.items())
            raise ConfigError(f"The network carries an adapter with other settings than lora_config ({listed}).")
    return model


def _starts_from_base_weights(config: PeftConfig | None) -> bool:
    """Whether an adapter's first values are computed from the weights that it adapts."""
    initial = getattr(config, "init_lora_weights", True)
    return bool(getattr(config, "use_dora", False)) or not (isinstance(initial, bool) or initial == "gaussian")


def _identity(network: nn.Module, runtime: Runtime, name: str | None) -> dict[str, Any]:
    inner = unwrap(network)
    return {
        "name_or_path": name or getattr(inner.config, "_name_or_path", ""),
        "fingerprint": base_fingerprint(runtime.readable(inner)),
        "dtype": str(inner.dtype).removeprefix("torch."),
        "embedding_rows": embedding_rows(inner),
    }


def build_optimizer(model: nn.Module, settings: LLMSettings, lr: float) -> OptimizerWrapper:
    """AdamW over the trainable parameters; with LoRA+ (arXiv 2402.12354) the B factors learn faster by a ratio."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = None
    if settings.lora_plus_ratio is not None:
        is_b = [
            any(part.startswith(("lora_B", "lora_embedding_B")) for part in name.split(".")) for name, _ in trainable
        ]
        groups = [
            {"params": [p for (_, p), b in zip(trainable, is_b, strict=True) if not b]},
            {
                "params": [p for (_, p), b in zip(trainable, is_b, strict=True) if b],
                "lr_ratio": settings.lora_plus_ratio,
            },
        ]
    kwargs = {"weight_decay": settings.weight_decay}
    return OptimizerWrapper(torch.optim.AdamW, {"actor": model}, lr, kwargs, lr_name="lr", parameter_groups=groups)
