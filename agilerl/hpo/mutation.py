"""Mutation of hyper-parameters: which agent, which one, which way.

Deciding and doing are apart, as in selection: ``plan`` draws, ``apply`` assigns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agilerl.algorithms.core.hyperparameters import Number, RLParameter
from agilerl.errors import ConfigError
from agilerl.hpo.member import Member
from agilerl.hpo.rng import load_rng_state, make_rng, rng_state

__all__ = ["Mutation", "Mutations"]

AnyMember = TypeVar("AnyMember", bound=Member)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mutation:
    """One change of one hyper-parameter."""

    name: str
    old: Number
    new: Number

    def __str__(self) -> str:
        return f"{self.name} {self.old:.6g} -> {self.new:.6g}"


class Mutations:
    """Mutates hyper-parameters of language-model agents.

    The signature is the one shared by all kinds of agents; a language model has a fixed architecture, so every
    probability but ``no_mutation`` and ``rl_hp`` must be zero where agents are mutated. The two are relative: 1 and 3
    mutate three agents in four.

    Args:
        no_mutation: Relative probability of leaving an agent as it is.
        architecture: Must be 0.
        new_layer_prob: Must be 0.
        parameters: Must be 0.
        activation: Must be 0.
        rl_hp: Relative probability of changing one hyper-parameter of ``agent.hp_config``.
        mutation_sd: Scale of weight mutations; without effect, as ``parameters`` is 0.
        dormant_threshold: Threshold of dormant-unit mutations; without effect, as ``parameters`` is 0.
        activation_selection: Activations to choose from; without effect, as ``activation`` is 0.
        mutate_elite: Whether the first agent, where selection puts the elite, may change.
        rand_seed: Seed of its own generator; ``None`` seeds it from the operating system.
        device: Without effect: hyper-parameters live on no device.
        accelerator: Must be None.

    Raises:
        ConfigError: A probability is negative or not finite, or both relative ones are zero.
    """

    def __init__(
        self,
        no_mutation: float,
        architecture: float,
        new_layer_prob: float,
        parameters: float,
        activation: float,
        rl_hp: float,
        mutation_sd: float = 0.1,
        dormant_threshold: float = 0.01,
        activation_selection: Sequence[str] | None = None,
        mutate_elite: bool = True,
        rand_seed: int | None = None,
        device: str = "cpu",
        accelerator: Any = None,
    ) -> None:
        self.no_mutation = no_mutation
        self.architecture = architecture
        self.new_layer_prob = new_layer_prob
        self.parameters = parameters
        self.activation = activation
        self.rl_hp = rl_hp
        self.mutation_sd = mutation_sd
        self.dormant_threshold = dormant_threshold
        self.activation_selection = activation_selection
        self.mutate_elite = mutate_elite
        self.rand_seed = rand_seed
        self.device = device
        _check_numbers(self)
        if accelerator is not None:
            raise ConfigError("accelerator must be None: agents carry their own distributed runtime.")
        self.accelerator = accelerator
        self.rng = make_rng(rand_seed)

    def check_language_model(self) -> None:
        """Refuse kinds of mutation that a language model cannot undergo.

        Raises:
            ConfigError: A probability other than ``no_mutation`` and ``rl_hp`` is not zero.
        """
        kinds = ("architecture", "new_layer_prob", "parameters", "activation")
        if found := [f"{kind}={getattr(self, kind)!r}" for kind in kinds if getattr(self, kind)]:
            raise ConfigError(
                f"Only hyper-parameters of a language model can be mutated (rl_hp); set to 0: {', '.join(found)}."
            )

    def plan(self, population: Sequence[Member], pre_training_mut: bool = False) -> list[Mutation | None]:
        """Decide on a change for each agent, or on none; draws from the generator and changes no agent.

        Args:
            population: Agents; the first is the elite.
            pre_training_mut: Before training: change every agent (the first one only with ``mutate_elite``).
        """
        self.check_language_model()
        plan: list[Mutation | None] = []
        for place, agent in enumerate(population):
            if place == 0 and not self.mutate_elite:
                plan.append(None)
                continue
            is_spared = self.rng.random() * (self.no_mutation + self.rl_hp) < self.no_mutation
            if not agent.hp_config or (is_spared and not pre_training_mut):
                plan.append(None)
                continue
            name, parameter = agent.hp_config.sample(self.rng)
            plan.append(_moved(agent, name, parameter, grow=bool(self.rng.random() < 0.5)))
        return plan

    def apply(self, population: Sequence[Member], plan: Sequence[Mutation | None]) -> None:
        """Carry out ``plan``: assign the values, run the mutation hooks, set ``agent.mut`` to the changed name."""
        for agent, change in zip(population, plan, strict=True):
            agent.mut = None if change is None else change.name
            if change is None:
                continue
            setattr(agent, change.name, change.new)
            agent.hp_config[change.name].value = change.new
            agent.mutation_hook()
            _logger.info("Agent %s mutates: %s", agent.index, change)

    def mutation(self, population: Sequence[AnyMember], pre_training_mut: bool = False) -> list[AnyMember]:
        """Mutate the agents in place and return them; see ``plan`` for the arguments.

        Raises:
            ConfigError: A probability other than ``no_mutation`` and ``rl_hp`` is not zero.
        """
        self.apply(population, self.plan(population, pre_training_mut))
        return list(population)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state as plain data."""
        return {"rng": rng_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        load_rng_state(self.rng, state["rng"])


def _check_numbers(mutations: Mutations) -> None:
    names = ("no_mutation", "architecture", "new_layer_prob", "parameters", "activation", "rl_hp", "mutation_sd")
    problems = [
        f"{name} must be a finite number of at least 0, got {value!r}"
        for name in names
        if not isinstance(value := getattr(mutations, name), (int, float)) or not math.isfinite(value) or value < 0
    ]
    total = sum(getattr(mutations, name) for name in names[:-1]) if not problems else 1
    if total == 0:
        problems.append("all probabilities are 0: give no_mutation or rl_hp a weight")
    if problems:
        raise ConfigError("; ".join(problems) + ".")


def _moved(agent: Member, name: str, parameter: RLParameter, *, grow: bool) -> Mutation:
    """One move from the agent's own present value."""
    ranks = int(getattr(getattr(agent, "runtime", None), "dp_size", 1))
    old = getattr(agent, name)
    if old is None and name in ("mini_batch_size", "micro_batch_size_per_gpu"):
        old = agent.batch_size // ranks  # type: ignore[attr-defined]  # unset sizes cover what a rank collects
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        raise ConfigError(f"Hyper-parameter '{name}' of agent {agent.index} is {old!r}; mutation needs a number.")
    step = ranks if name == "batch_size" else 1
    return Mutation(name, old, parameter.moved(old, grow=grow, step=step))
