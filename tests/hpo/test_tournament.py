from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from agilerl.hpo.tournament import TournamentSelection
from tests.hpo.fakes import FakeAgent


def population(*fitnesses: float, index: int | None = None) -> list[FakeAgent]:
    return [FakeAgent(n if index is None else index, fitness) for n, fitness in enumerate(fitnesses)]


def test_three_agents_with_one_index_descend_from_the_best():
    elite, following, *_ = TournamentSelection(3, True, 3).select(population(0.0, 1.0, 2.0, index=7))
    assert elite.fitness == [2.0]
    assert [agent.fitness for agent in following] == [[2.0]] * 3
    assert len({agent.index for agent in following}) == 3


def test_members_are_clones_and_the_given_agents_stay():
    pop = population(0.0, 1.0, 2.0)
    elite, following, *_ = TournamentSelection(2, True, 3).select(pop)
    assert elite is pop[2]
    assert not {id(agent) for agent in following} & {id(agent) for agent in pop}
    assert following[0].index == elite.index
    assert not any(agent.cleaned for agent in pop)


def test_contestants_are_drawn_without_replacement():
    # With everyone in every draw the best must win every place; a draw with replacement would miss it now and then.
    selection = TournamentSelection(4, False, 50)
    assert set(selection.choose([0.0, 3.0, 1.0, 2.0]).parents) == {1}


def test_small_tournaments_give_others_a_chance():
    parents = TournamentSelection(1, False, 200).choose([0.0, 1.0, 2.0]).parents
    assert set(parents) == {0, 1, 2}


def test_tournament_size_is_capped_at_the_candidates():
    assert set(TournamentSelection(99, False, 5).choose([0.0, 5.0, math.nan]).parents) == {1}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nan_never_wins(size):
    selection = TournamentSelection(size, True, 40)
    choice = selection.choose([-1.0, -2.0, math.nan])
    assert choice.elite == 0
    assert 2 not in choice.parents
    assert TournamentSelection(3, True, 4).choose([math.nan, -math.inf, math.nan]).elite == 1
    with pytest.raises(ValueError, match="all 2 agents is NaN"):
        selection.choose([math.nan, math.nan])


def test_only_the_last_fitness_counts():
    pop = population(0.0, 0.0)
    pop[0].fitness = [9.0, 9.0, 1.0]
    pop[1].fitness = [0.0, 2.0]
    assert TournamentSelection(2, True, 2).select(pop)[0] is pop[1]
    pop[0].fitness.append(np.array([3.0, 5.0]))
    assert TournamentSelection(2, True, 2).select(pop)[0] is pop[0]


def test_same_seed_same_choices_and_state_continues_them():
    first, second = TournamentSelection(2, False, 10), TournamentSelection(2, False, 10)
    fitnesses = [float(n) for n in range(6)]
    assert first.choose(fitnesses) == second.choose(fitnesses)
    state = first.state_dict()
    expected = [first.choose(fitnesses) for _ in range(3)]
    fresh = TournamentSelection(2, False, 10, rand_seed=5)
    fresh.load_state_dict(state)
    assert [fresh.choose(fitnesses) for _ in range(3)] == expected
    with pytest.raises(ValueError, match="generator"):
        fresh.load_state_dict({"rng": {"kind": "MT19937"}})


def test_global_generators_are_neither_read_nor_moved():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    TournamentSelection(2, True, 5).select(population(0.0, 1.0, 2.0))
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_mistakes_get_a_sentence():
    with pytest.raises(ValueError, match="tournament_size"):
        TournamentSelection(0, True, 2)
    with pytest.raises(ValueError, match="population_size"):
        TournamentSelection(2, True, True)
    with pytest.raises(ValueError, match="elitism"):
        TournamentSelection(2, 2, 2)
    with pytest.raises(ValueError, match="no fitness yet"):
        TournamentSelection(2, True, 1).select([FakeAgent()])
    with pytest.raises(ValueError, match="empty"):
        TournamentSelection(2, True, 1).select([])
