"""Adapters by role: actor, reference, critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from agilerl.errors import CheckpointError, ModelError
from agilerl.models.lora import add_adapter
from agilerl.models.misfits import misfits

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["FROZEN_ROLES", "Adapters"]

FROZEN_ROLES = frozenset({"reference"})
"""Roles that are never trained."""


class Adapters:
    """The adapters of a ``PeftModel``, each under the name of its role.

    One role is active at a time. All trainable roles keep ``requires_grad`` whichever is active, so that hooks and
    optimizers stay attached to the same parameters; the reference never requires gradients.
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.activate(self.active)

    @property
    def names(self) -> tuple[str, ...]:
        """Roles that exist, in the order in which they were added."""
        return tuple(self.model.peft_config)

    @property
    def active(self) -> str:
        """The role whose adapter is used by the model's forward."""
        active = self.model.active_adapter
        return active if isinstance(active, str) else active[0]

    def add(self, role: str, *, like: str = "actor", seed: int) -> None:
        """Add an adapter with the configuration of ``like`` and a fresh initialisation of its own seed."""
        if role in self.names:
            raise ModelError(f"There is an adapter {role!r} already; the roles are {', '.join(self.names)}.")
        config = self.config(like)
        if getattr(config, "bias", "none") != "none":
            raise ModelError(
                f"bias={config.bias!r} trains biases of the base model, which several adapters cannot share; "  # type: ignore[attr-defined]
                f"use bias='none' to add the adapter {role!r}."
            )
        active = self.active
        add_adapter(self.model, config, seed=seed, name=role)
        self.activate(active)

    def activate(self, role: str) -> None:
        """Make ``role`` the one that forward uses, and set ``requires_grad`` of every role.

        Raises:
            ModelError: There is no such role.
        """
        self._check(role)
        self.model.set_adapter(role)
        for name in self.names:
            for parameter in self._parameters(name):
                parameter.requires_grad_(name not in FROZEN_ROLES)

    @contextmanager
    def select(self, role: str) -> Iterator[None]:
        """Activate ``role`` for a while; the role that was active comes back, on errors too."""
        before = self.active
        self.activate(role)
        try:
            yield
        finally:
            self.activate(before)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model without any adapter, for a while."""
        config = self.config(self.active)
        if getattr(config, "bias", "none") != "none":
            raise ModelError(
                "An adapter that trains biases of the base model cannot be switched off; use bias='none', "
                "or a separate reference adapter."
            )
        flags = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            with self.model.disable_adapter():
                yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def copy(self, source: str, target: str) -> None:
        """Overwrite the weights of ``target`` with those of ``source``."""
        self.write(target, self.read(source))

    def read(self, role: str) -> dict[str, Tensor]:
        """Weights of a role under the names of PEFT's ``adapter_model.safetensors``; views, not copies."""
        self._check(role)
        # With "auto" PEFT may ask the Hub for the base model's vocabulary in the middle of a save; without a state dict
        # it takes the one-dimensional biases of lora_bias=True for unfinished shards (peft 0.21).
        return get_peft_model_state_dict(
            self.model, self.model.state_dict(), adapter_name=role, save_embedding_layers=False
        )

    def write(
        self,
        role: str,
        tensors: Mapping[str, Tensor],
        *,
        assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        """Overwrite the weights of a role in place; nothing is written unless everything fits.

        Args:
            role: The adapter.
            tensors: Whole tensors under the names that `read` gives.
            assign: Copies the second tensor into the first, which may be a shard of a distributed one.

        Raises:
            CheckpointError: A tensor is missing, unknown or of another shape; all of them are named.
        """
        current = self.read(role)
        if problems := misfits(current, tensors):
            raise CheckpointError(f"The weights do not fit the adapter {role!r}: {problems}.")
        with torch.no_grad():
            for name, tensor in current.items():
                assign(tensor, tensors[name])

    def config(self, role: str) -> PeftConfig | LoraConfig:
        """Configuration of a role; change a copy only."""
        self._check(role)
        return self.model.peft_config[role]

    def _check(self, role: Any) -> None:
        if role not in self.names:
            raise ModelError(f"There is no adapter {role!r}; the roles are {', '.join(self.names)}.")

    def _parameters(self, role: str) -> Iterator[torch.nn.Parameter]:
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                for layer_name in module.adapter_layer_names:
                    yield from _of_role(getattr(module, layer_name, None), role)


def _of_role(holder: Any, role: str) -> Iterator[torch.nn.Parameter]:
    if isinstance(holder, torch.nn.ModuleDict | torch.nn.ParameterDict) and role in holder:
        item = holder[role]
        if isinstance(item, torch.nn.Parameter):
            yield item
        else:
            yield from item.parameters()
