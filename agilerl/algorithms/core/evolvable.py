"""The outer shell of every agent: identity, history, registry, and views of what it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
from torch import nn

from agilerl.algorithms.core.grama import GramaCapture
from agilerl.algorithms.core.registry import HyperparameterConfig, MutationRegistry, NetworkGroup, OptimizerConfig
from agilerl.algorithms.core.state import AgentState
from agilerl.errors import ConfigError
from agilerl.optim import OptimizerWrapper

__all__ = ["EvolvableAlgorithm"]


class EvolvableAlgorithm:
    """A member of a population: it has an index, a history, mutable hyper-parameters, networks and optimizers.

    What an agent is lives in three places: frozen settings, `AgentState`, and resources that are rebuilt from them. Any
    other attribute that is assigned (by a user or a subclass) is an extra: it is cloned, inspected and, where it is
    plain data, saved with the agent.
    """

    _state: AgentState
    registry: MutationRegistry

    _resource_names: frozenset[str] = frozenset({"registry", "grama_scores", "training"})
    """Attributes held directly on the instance, besides names that start with an underscore."""

    def __init__(self, index: int = 0, hp_config: HyperparameterConfig | None = None) -> None:
        self._state = AgentState(index=index)
        self.registry = MutationRegistry(hp_config)
        self.grama_scores: dict[str, Any] = {}
        self.training = True
        self._grama: GramaCapture | None = None

    # -- extras ------------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        # What the class has, a method among them, is found there before any extra: the instance has to hold it itself.
        if name.startswith("_") or name in self._resource_names or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            self.extras[name] = value

    def __getattr__(self, name: str) -> Any:
        extras = self.__dict__.get("_early_extras") or {}
        state = self.__dict__.get("_state")
        if state is not None and name in state.extras:
            return state.extras[name]
        if name in extras:
            return extras[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if name in self.extras:
            del self.extras[name]
        else:
            object.__delattr__(self, name)

    @property
    def extras(self) -> dict[str, Any]:
        """Attributes that a user or a subclass added."""
        state = self.__dict__.get("_state")
        if state is None:  # a subclass may assign before it calls our constructor
            return self.__dict__.setdefault("_early_extras", {})
        early = self.__dict__.pop("_early_extras", None)
        if early:
            state.extras.update(early)
        return state.extras

    # -- identity and history ----------------------------------------------------------------------------------------

    @property
    def algo(self) -> str:
        """Name of the algorithm, such as "SFT"."""
        return type(self).__name__

    @property
    def index(self) -> int:
        """Return the index of the algorithm."""
        return self._state.index

    @index.setter
    def index(self, value: int) -> None:
        self._state.index = int(value)

    @property
    def mut(self) -> str | None:
        """The last mutation, in words; None before one."""
        return self._state.mut

    @mut.setter
    def mut(self, value: str | None) -> None:
        self._state.mut = value

    @property
    def hp_config(self) -> HyperparameterConfig:
        """Return the hyperparameter configuration for evolutionary mutations."""
        return self.registry.hp_config

    @hp_config.setter
    def hp_config(self, value: HyperparameterConfig | None) -> None:
        config = HyperparameterConfig() if value is None else value
        unknown = [name for name in config.names() if name not in self._state.hyperparameters]
        if unknown:
            known = ", ".join(self._state.hyperparameters)
            raise ConfigError(
                f"hp_config names {', '.join(unknown)}, which {self.algo} cannot mutate; it can: {known}."
            )
        self.registry.hp_config = config

    @property
    def fitness(self) -> list[Any]:
        """Fitness history, one number per evaluation; higher is better."""
        return self._state.record.fitness

    @fitness.setter
    def fitness(self, value: Sequence[float | np.ndarray]) -> None:
        self._state.record.fitness = list(value)

    @property
    def scores(self) -> list[Any]:
        """Scores added so far."""
        return self._state.record.scores

    @scores.setter
    def scores(self, value: Sequence[float | list[float]]) -> None:
        self._state.record.scores = list(value)

    @property
    def steps(self) -> int:
        """Dataset rows trained on, over all ranks."""
        return self._state.record.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._state.record.steps = int(value)

    def add_scores(self, scores: Sequence[float | list[float]]) -> None:
        """Add scores, each a number or a list of numbers."""
        self._state.record.add_scores(scores)

    def init_training_step(self, capture_grama: bool = False) -> None:
        """Open a training block; one that an earlier call left open is closed first.

        Args:
            capture_grama: Capture gradient magnitudes into `grama_scores` until the block is closed.
        """
        self._close_grama()
        self._state.record.open()
        if capture_grama:
            self._grama = GramaCapture(self.get_policy())

    def finalize_training_step(self, num_steps: int) -> None:
        """Close the training block.

        Args:
            num_steps: Dataset rows trained in it, over all ranks.
        """
        self._close_grama()
        self._state.record.close(num_steps)

    def _close_grama(self) -> None:
        if self._grama is not None:
            self.grama_scores = self._grama.close()
            self._grama = None

    # -- registry ----------------------------------------------------------------------------------------------------

    def register_network_group(self, group: NetworkGroup) -> None:
        """Declare an evaluation network and those that share its weights."""
        self.registry.register_group(group)

    def register_mutation_hook(self, hook: Callable[[], Any] | str) -> None:
        """Declare a hook that runs after each mutation: a method of the agent, its name, or a plain callable."""
        owner = getattr(hook, "__self__", None)
        # A bound method would go on acting on this agent from its clones: keep its name.
        self.registry.register_hook(hook.__name__ if owner is self else hook)  # type: ignore[union-attr]

    def mutation_hook(self) -> None:
        """Execute the hooks registered with the algorithm."""
        for hook in self.registry.hooks:
            (getattr(self, hook) if isinstance(hook, str) else hook)()

    def get_lr_names(self) -> list[str | tuple[str, str]]:
        """Return the learning-rate attribute name(s) of each optimizer."""
        return self.registry.lr_names

    # -- networks ----------------------------------------------------------------------------------------------------

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Return networks and, unless ``networks_only``, optimizers by attribute name."""
        names = list(self.registry.networks)
        if not networks_only:
            names += [optimizer.name for optimizer in self.registry.optimizers]
        return {name: getattr(self, name) for name in names}

    def get_policy(self) -> nn.Module:
        """Return the policy network of the algorithm."""
        name = self.registry.policy
        if name is None:
            raise ConfigError(f"{self.algo} has registered no policy network.")
        return getattr(self, name)

    def eval_policy_network_ids(self) -> set[int]:
        """Return the ``id`` of every evaluation network in the policy group."""
        return {id(getattr(self, group.eval_network)) for group in self.registry.groups if group.policy}

    def unrolled_eval_networks(self) -> list[tuple[str | None, nn.Module]]:
        """Return the evaluation networks as (network_id, network) pairs."""
        return [(group.eval_network, getattr(self, group.eval_network)) for group in self.registry.groups]

    def get_eval_modules(self, cloning: bool = True) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """Return the policy and the other evaluation networks, each by attribute name.

        Args:
            cloning: Return independent copies (frozen tensors are shared) instead of the networks themselves.
        """
        policies: dict[str, nn.Module] = {}
        others: dict[str, nn.Module] = {}
        for group in self.registry.groups:
            network = getattr(self, group.eval_network)
            target = policies if group.policy else others
            target[group.eval_network] = self._copy_network(network) if cloning else network
        return policies, others

    def _copy_network(self, network: nn.Module) -> nn.Module:
        return copy.deepcopy(network)

    def reinit_optimizers(self, optimizer: OptimizerConfig | None = None) -> None:
        """Build optimizers anew, with empty moments.

        Args:
            optimizer: The one to rebuild; None rebuilds all.
        """
        configs = self.registry.optimizers if optimizer is None else [optimizer]
        known = [c.name for c in self.registry.optimizers]
        for config in configs:
            if config.name not in known:
                raise ConfigError(f"{self.algo} has no optimizer {config.name!r}; it has: {', '.join(known)}.")
            self._install_optimizer(config)

    def _install_optimizer(self, config: OptimizerConfig) -> OptimizerWrapper:
        raise NotImplementedError

    # -- attribute views ---------------------------------------------------------------------------------------------

    def _input_arguments(self) -> dict[str, Any]:
        """Constructor arguments with their present values; networks left out."""
        return {"index": self.index, "hp_config": self.hp_config}

    @staticmethod
    def inspect_attributes(agent: Any, input_args_only: bool = False, exclude: Iterable[str] = ()) -> dict[str, Any]:
        """Return an agent's attributes and their values; networks and optimizers are left out.

        Args:
            agent: The agent.
            input_args_only: Return constructor arguments only.
            exclude: Further names to leave out.
        """
        values = dict(agent._input_arguments())
        if not input_args_only:
            values.update(
                fitness=agent.fitness, scores=agent.scores, steps=agent.steps, mut=agent.mut, algo=agent.algo,
                training=agent.training, grama_scores=agent.grama_scores, **agent.extras,
            )  # fmt: skip
        dropped = set(exclude) | set(agent.registry.networks) | {o.name for o in agent.registry.optimizers}
        return {name: value for name, value in values.items() if name not in dropped}

    @staticmethod
    def copy_attributes(agent: Any, clone: Any, exclude: Iterable[str] = ()) -> Any:
        """Copy history, hyper-parameters and extras of ``agent`` to ``clone`` and return it.

        Args:
            agent: Where to copy from.
            clone: Where to copy to; its index stays its own.
            exclude: Attribute names to leave as they are on ``clone``.
        """
        excluded = set(exclude) | {"index"}
        source, target = agent._state.copy(), clone._state
        for name in ("fitness", "scores", "steps"):
            if name not in excluded:
                setattr(target.record, name, getattr(source.record, name))
        for name in ("mut", "learn_calls", "schedule_step", "reference_update_tracker"):
            if name not in excluded:
                setattr(target, name, getattr(source, name))
        for mine, theirs in ((target.hyperparameters, source.hyperparameters), (target.extras, source.extras)):
            mine.update({name: value for name, value in theirs.items() if name not in excluded})
        if "hp_config" not in excluded:
            clone.registry.hp_config = copy.deepcopy(agent.registry.hp_config)
        return clone

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Create an independent copy of the agent."""
        raise NotImplementedError

    def clean_up(self) -> None:
        """Give back what the agent holds."""
        self._close_grama()
