"""A learning rate that starts 30 times too low is found by evolution while it trains."""

from __future__ import annotations

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.llm import train_llm_dataset
from tests.training.agents import make_agent, make_env

GOOD_LR = 3e-2
"""Held-out loss of one agent after 420 rows, by rate: 1e-3 5.48, 1e-2 3.29, 2e-2 2.85, 3e-2 2.75, 4e-2 2.75, 6e-2 3.18,
1e-1 3.71."""


def study(size: int, **evolution):
    ranges = HyperparameterConfig(lr=RLParameter(1e-5, 1.0, shrink_factor=0.5, grow_factor=2.0))
    first = make_agent(lr=GOOD_LR / 30, batch_size=7, hp_config=ranges)
    pop = [first, *(first.clone(index=n) for n in range(1, size))]
    env = make_env(train=420, test=14, batch=7)
    pop, fitness = train_llm_dataset(pop, env, verbose=False, checkpoints=False, evaluation_interval=None, **evolution)
    best = fitness.index(max(fitness))
    return pop[best], fitness[best]


def test_evolution_finds_a_planted_rate_and_beats_one_agent_with_the_same_rows():
    _, alone = study(1)
    winner, evolved = study(
        4, evo_steps=3, eval_batches=2, pre_training_mut=True, tournament=TournamentSelection(2, True, 4, rand_seed=0),
        mutation=Mutations(0.2, 0, 0, 0, 0, 0.8, mutate_elite=False, rand_seed=0),
    )  # fmt: skip
    assert winner.steps == 420
    assert GOOD_LR / 2 <= winner.lr <= GOOD_LR * 2
    assert evolved > alone + 1.0
