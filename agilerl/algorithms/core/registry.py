"""What an agent declares about itself: networks, optimizers, mutable hyper-parameters, hooks run after a mutation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agilerl.algorithms.core.hyperparameters import HyperparameterConfig, RLParameter, make_default_hp_config
from agilerl.errors import ConfigError

__all__ = [
    "HyperparameterConfig",
    "MutationRegistry",
    "NetworkGroup",
    "OptimizerConfig",
    "RLParameter",
    "make_default_hp_config",
]


def _names(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


@dataclass(frozen=True)
class NetworkGroup:
    """An evaluation network, by attribute name, with the networks that share its weights.

    Args:
        eval_network: Attribute name of the network that learns.
        shared_networks: Attribute names of networks that follow it (targets, references).
        policy: Whether this group is the one that acts; an agent has exactly one.
    """

    eval_network: str
    shared_networks: str | Sequence[str] | None = None
    policy: bool = False

    @property
    def networks(self) -> list[str]:
        """All attribute names of the group, the evaluation network first."""
        return [self.eval_network, *_names(self.shared_networks)]


@dataclass(frozen=True)
class OptimizerConfig:
    """How one optimizer of an agent is built.

    Args:
        name: Attribute name of the ``OptimizerWrapper``.
        networks: Attribute name(s) of the networks whose parameters it updates.
        lr: Attribute name of the learning rate, or the (actor, critic) pair of names.
        optimizer_cls: The torch optimizer class.
        optimizer_kwargs: Its keyword arguments besides the rate.
    """

    name: str
    networks: str | Sequence[str]
    lr: str | tuple[str, str]
    optimizer_cls: Any
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network_names(self) -> list[str]:
        """Attribute names of the networks, as a list."""
        return _names(self.networks)


class MutationRegistry:
    """The declarations of one agent. Holds names only, never the agent, a network or an optimizer.

    Args:
        hp_config: The hyper-parameters that mutation may change; none when left out.
    """

    def __init__(self, hp_config: HyperparameterConfig | None = None) -> None:
        self.hp_config = HyperparameterConfig() if hp_config is None else hp_config
        self.groups: list[NetworkGroup] = []
        self.optimizers: list[OptimizerConfig] = []
        self.hooks: list[Callable[[], Any] | str] = []

    @property
    def policy(self) -> str | None:
        """Attribute name of the network that acts, or None before one is registered."""
        return next((group.eval_network for group in self.groups if group.policy), None)

    @property
    def networks(self) -> list[str]:
        """Attribute names of all registered networks, in order of registration."""
        return [name for group in self.groups for name in group.networks]

    @property
    def lr_names(self) -> list[str | tuple[str, str]]:
        """Attribute name(s) of the learning rate of each optimizer."""
        return [optimizer.lr for optimizer in self.optimizers]

    def register_group(self, group: NetworkGroup) -> None:
        """Add a network group.

        Raises:
            ConfigError: A name is registered already, or there is a policy already.
        """
        if taken := sorted(set(group.networks) & set(self.networks)):
            raise ConfigError(f"Network {', '.join(taken)} is registered already.")
        if group.policy and self.policy is not None:
            raise ConfigError(f"'{self.policy}' is the policy already; '{group.eval_network}' cannot be one too.")
        self.groups.append(group)

    def register_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Add an optimizer.

        Raises:
            ConfigError: The name is registered already, or it names an unknown network.
        """
        if any(known.name == optimizer.name for known in self.optimizers):
            raise ConfigError(f"Optimizer '{optimizer.name}' is registered already.")
        if unknown := sorted(set(optimizer.network_names) - set(self.networks)):
            known_networks = ", ".join(self.networks) or "none"
            raise ConfigError(
                f"Optimizer '{optimizer.name}' names unregistered network {', '.join(unknown)}; "
                f"registered: {known_networks}."
            )
        self.optimizers.append(optimizer)

    def register_hook(self, hook: Callable[[], Any] | str) -> None:
        """Add a hook that runs after a mutation: a callable without arguments, or a method name of the agent.

        A method is best given by name: a bound method of one agent would go on acting on it from its clones.

        Raises:
            ConfigError: It is neither.
        """
        if not (callable(hook) or isinstance(hook, str)):
            raise ConfigError(f"A mutation hook is a callable or a method name, got {type(hook).__name__}.")
        self.hooks.append(hook)
