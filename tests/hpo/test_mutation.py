from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from tests.hpo.fakes import FakeAgent


def mutations(no_mutation: float = 0.0, rl_hp: float = 1.0, **kwargs) -> Mutations:
    return Mutations(no_mutation, 0, 0, 0, 0, rl_hp, **{"rand_seed": 0, **kwargs})


def test_mutation_starts_from_the_agents_own_value():
    agent = FakeAgent(lr=1e-2, hp_config=HyperparameterConfig(lr=RLParameter(1e-5, 1e-1)))
    agent.hp_config.lr.value = 5e-5  # a stale value of another agent must not matter
    (same,) = mutations().mutation([agent])
    assert same is agent
    assert agent.lr in (pytest.approx(0.8e-2), pytest.approx(1.2e-2))
    assert agent.hp_config.lr.value == agent.lr
    assert agent.mut == "lr"
    assert agent.hooks_run == 1


def test_two_hundred_mutations_stay_in_bounds_and_ints_move():
    agent, mutate = FakeAgent(), mutations()
    seen = set()
    for _ in range(200):
        before = {"lr": agent.lr, "batch_size": agent.batch_size}
        mutate.mutation([agent])
        seen.add(agent.mut)
        assert 1e-5 <= agent.lr <= 1e-1
        assert 1 <= agent.batch_size <= 64
        assert isinstance(agent.batch_size, int)
        assert getattr(agent, agent.mut) != before[agent.mut]
        other = "lr" if agent.mut == "batch_size" else "batch_size"
        assert getattr(agent, other) == before[other]
    assert seen == {"lr", "batch_size"}


def test_probabilities_are_relative():
    pop = [FakeAgent(n) for n in range(2000)]
    mutations(1.0, 3.0).mutation(pop)
    share = sum(agent.mut is not None for agent in pop) / len(pop)
    assert share == pytest.approx(0.75, abs=0.03)
    mutations(1.0, 0.0).mutation(pop)
    assert all(agent.mut is None for agent in pop)


def test_the_elite_is_spared_when_asked():
    pop = [FakeAgent(n) for n in range(4)]
    mutations(mutate_elite=False).mutation(pop)
    assert pop[0].mut is None
    assert (pop[0].lr, pop[0].batch_size, pop[0].hooks_run) == (1e-3, 16, 0)
    assert all(agent.mut for agent in pop[1:])


def test_before_training_everyone_is_varied():
    pop = [FakeAgent(n) for n in range(20)]
    mutations(1.0, 1e-9, mutate_elite=False).mutation(pop, pre_training_mut=True)
    assert pop[0].mut is None
    assert all(agent.mut for agent in pop[1:])


def test_an_agent_without_ranges_stays():
    agent = FakeAgent(hp_config=HyperparameterConfig())
    mutations().mutation([agent])
    assert agent.mut is None


def test_batch_size_stays_a_multiple_of_the_ranks():
    config = HyperparameterConfig(batch_size=RLParameter(1, 64, dtype=int))
    agent = FakeAgent(batch_size=8, runtime=SimpleNamespace(dp_size=4), hp_config=config)
    for _ in range(30):
        mutations(rand_seed=None).mutation([agent])
        assert agent.batch_size % 4 == 0


def test_unset_sizes_start_from_what_a_rank_collects():
    agent = FakeAgent(
        batch_size=16,
        mini_batch_size=None,
        hp_config=HyperparameterConfig(mini_batch_size=RLParameter(1, 64, dtype=int)),
    )
    mutations().mutation([agent])
    assert agent.mini_batch_size in (13, 19)


@pytest.mark.parametrize("kind", ["architecture", "new_layer_prob", "parameters", "activation"])
def test_other_kinds_of_mutation_are_refused(kind):
    kwargs = {
        "no_mutation": 0.5,
        "architecture": 0,
        "new_layer_prob": 0,
        "parameters": 0,
        "activation": 0,
        "rl_hp": 0.5,
    }
    refused = Mutations(**{**kwargs, kind: 0.2})
    with pytest.raises(ValueError, match=f"{kind}=0.2"):
        refused.mutation([FakeAgent()])


def test_bad_numbers_are_told_together():
    with pytest.raises(ValueError, match=r"no_mutation.*rl_hp"):
        Mutations(-1, 0, 0, 0, 0, float("nan"))
    with pytest.raises(ValueError, match="all probabilities are 0"):
        Mutations(0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="accelerator"):
        mutations(accelerator=object())
    with pytest.raises(ValueError, match="needs a number"):
        mutations().mutation([FakeAgent(lr="high", hp_config=HyperparameterConfig(lr=RLParameter(1e-5, 1e-1)))])


def test_same_seed_same_mutations_and_state_continues_them():
    def history(mutate: Mutations, rounds: int) -> list:
        pop = [FakeAgent(n) for n in range(4)]
        return [[(a.mut, a.lr, a.batch_size) for a in mutate.mutation(pop)] for _ in range(rounds)]

    assert history(mutations(0.3, 0.7), 5) == history(mutations(0.3, 0.7), 5)
    first = mutations(0.3, 0.7)
    history(first, 2)
    resumed = mutations(0.3, 0.7, rand_seed=9)
    resumed.load_state_dict(first.state_dict())
    assert history(first, 3) == history(resumed, 3)


def test_global_generators_are_neither_read_nor_moved():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    mutations(rand_seed=None).mutation([FakeAgent(n) for n in range(5)])
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
