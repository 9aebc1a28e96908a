"""The one optimizer of an agent: parameter groups by role, rates, and state kept by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.errors import ConfigError
from agilerl.optim.adamw import MasterAdamW

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper:
    """A torch optimizer over the trainable parameters of one or several networks.

    Groups carry ``role`` ("actor" or "critic") and, where given, ``lr_ratio`` (rate relative to ``lr``, as LoRA+ uses it).
    With weight decay, only tensors of two or more dimensions decay.

    Args:
        optimizer_cls: Class of the optimizer; ``torch.optim.AdamW`` is replaced by its master-keeping form for
            low-precision parameters.
        networks: One network, several, or a mapping of name to network.
        lr: Learning rate of every group, times the group's ``lr_ratio``.
        optimizer_kwargs: Further arguments of the optimizer.
        network_names: Names of the networks, in order; "critic" tags a critic's groups.
        lr_name: Name of the agent's attribute that holds ``lr``.
        parameter_groups: Groups (``params``, optional ``lr_ratio``, ``role``) instead of all trainable parameters.

    Raises:
        ConfigError: Nothing is trainable.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        networks: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        lr: float,
        optimizer_kwargs: dict[str, Any] | None = None,
        network_names: Sequence[str] | None = None,
        lr_name: str | None = None,
        *,
        parameter_groups: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self.networks = _named(networks, network_names)
        self.network_names = list(self.networks)
        self.optimizer_cls = optimizer_cls
        self.optimizer_kwargs = dict(optimizer_kwargs or {})
        self.lr_name = lr_name or "lr"
        self.lr = lr
        groups = list(parameter_groups) if parameter_groups is not None else _groups_of(self.networks)
        groups = [g for group in groups for g in _split_by_decay(group, self.optimizer_kwargs.get("weight_decay", 0.0))]
        if not any(g["params"] for g in groups):
            raise ConfigError("Nothing is trainable: every parameter of the network(s) is frozen.")
        for group in groups:
            group["lr"] = lr * group.setdefault("lr_ratio", 1.0)
            group.setdefault("role", "actor")
        if optimizer_cls is torch.optim.AdamW and any(_is_low_precision(g["params"]) for g in groups):
            optimizer_cls = MasterAdamW
        self.optimizer = optimizer_cls(groups, lr=lr, **self.optimizer_kwargs)  # type: ignore[call-arg]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the torch optimizer."""
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters under optimisation, in group order."""
        return [p for group in self.param_groups for p in group["params"]]

    def step(self) -> None:
        """Make one optimizer step with the gradients that the parameters hold."""
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def set_rates(self, actor: float, critic: float | None = None) -> None:
        """Set the rate of every group: ``actor`` or ``critic`` by its role, times its own ratio."""
        for group in self.param_groups:
            rate = critic if group.get("role") == "critic" and critic is not None else actor
            group["lr"] = rate * group.get("lr_ratio", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """State of the torch optimizer, keyed by position; see `agilerl.distributed` for the form kept by name."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optimizer.load_state_dict(state)

    def copy_state(self, other: OptimizerWrapper) -> None:
        """Take over copies of another wrapper's state, parameter by parameter in group order; shares no tensor."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if theirs in other.optimizer.state:
                self.optimizer.state[mine] = {
                    k: v.clone() if isinstance(v, Tensor) else v for k, v in other.optimizer.state[theirs].items()
                }

    def __repr__(self) -> str:
        """Class, rate and size."""
        count = sum(p.numel() for p in self.parameters)
        return f"OptimizerWrapper({type(self.optimizer).__name__}, lr={self.lr}, {count:,} parameters)"


def _named(
    networks: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module], names: Sequence[str] | None
) -> dict[str, nn.Module]:
    if isinstance(networks, Mapping):
        return dict(networks)
    modules = [networks] if isinstance(networks, nn.Module) else list(networks)
    names = list(names) if names else [f"network_{i}" if i else "actor" for i in range(len(modules))]
    if len(names) != len(modules):
        raise ConfigError(f"network_names has {len(names)} names for {len(modules)} networks.")
    return dict(zip(names, modules, strict=True))


def _groups_of(networks: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    groups = []
    for name, network in networks.items():
        params = [p for p in network.parameters() if p.requires_grad]
        groups.append({"params": params, "role": "critic" if name == "critic" else "actor"})
    return [g for g in groups if g["params"]]


def _split_by_decay(group: dict[str, Any], weight_decay: float) -> list[dict[str, Any]]:
    if not weight_decay:
        return [group]
    decaying = [p for p in group["params"] if p.ndim >= 2]
    others = [p for p in group["params"] if p.ndim < 2]
    parts = [{**group, "params": decaying}, {**group, "params": others, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]


def _is_low_precision(params: Iterable[Tensor]) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in params)
