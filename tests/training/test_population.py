"""``train_llm_dataset`` with several agents: budgets, selection, lineage, elites, resume."""

from __future__ import annotations

import json

import pytest
import torch

from agilerl.checkpoint import read_checkpoint
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.llm import lineage_table, read_lineage, train_llm_dataset, winning_settings
from tests.training.agents import make_env, make_population


def evolve(pop, env, **kwargs):
    chosen = {
        "selection_strategy": TournamentSelection(2, True, len(pop)),
        "mutation": Mutations(0.2, 0, 0, 0, 0, 0.8, mutate_elite=False, rand_seed=3),
        "evo_steps": 2,
        "verbose": False,
        "checkpoints": False,
        "pre_training_mut": True,
    }
    return train_llm_dataset(pop, env, **(chosen | kwargs))


def weights(agent) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in agent.actor.named_parameters() if p.requires_grad}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_agent_gets_the_whole_budget_and_the_same_rows():
    pop = make_population(3)
    seen: dict[int, list] = {}
    for agent in pop:
        learn = agent.learn
        agent.__dict__["learn"] = lambda batch, a=agent, f=learn: (
            seen.setdefault(a.index, []).extend(batch["prompt"]),
            f(batch),
        )[1]
    pop[1].batch_size = 5
    trained, fitness = train_llm_dataset(pop, make_env(train=20), num_epochs=2, verbose=False, checkpoints=False)
    assert [agent.steps for agent in trained] == [40, 40, 40]
    assert seen[0] == seen[1] == seen[2]
    assert fitness == [agent.fitness[-1] for agent in trained]
    assert len({len(agent.fitness) for agent in trained}) == 1


def test_members_differ_only_by_their_own_settings():
    pop = make_population(2)
    train_llm_dataset(pop, make_env(train=16), verbose=False, checkpoints=False)
    assert same(weights(pop[0]), weights(pop[1]))
    pop = make_population(2)
    pop[1].lr = 1e-3
    train_llm_dataset(pop, make_env(train=16), verbose=False, checkpoints=False)
    assert not same(weights(pop[0]), weights(pop[1]))


class WatchedSelection(TournamentSelection):
    """Looks at the weights when it is asked, and whether they are those that were measured."""

    def select(self, population):
        for agent in population:
            assert same(agent.__dict__["measured"], weights(agent))
        self.__dict__.setdefault("calls", []).append([agent.fitness[-1] for agent in population])
        return super().select(population)


def test_selection_only_after_an_evaluation_of_those_very_weights(monkeypatch):
    from agilerl.algorithms.sft import SFT

    test = SFT.test

    def watched(self, env, loop=1):
        self.__dict__["measured"] = weights(self)
        return test(self, env, loop)

    monkeypatch.setattr(SFT, "test", watched)
    selection = WatchedSelection(2, True, 3)
    pop, _ = evolve(make_population(3), make_env(train=40), selection_strategy=selection, evaluation_interval=3)
    assert len(selection.calls) >= 2
    assert len(pop) == 3


def test_the_elite_goes_on_unchanged_and_others_descend_from_winners(tmp_path):
    env = make_env(train=40)
    evolve(make_population(3), env, checkpoints=True, checkpoint_path=tmp_path)
    lineage = read_lineage(tmp_path)
    generations = {row["generation"] for row in lineage}
    assert generations >= {0, 1, 2}
    for row in lineage:
        previous = [r for r in lineage if r["generation"] == row["generation"] - 1 and not r.get("final")]
        if row["generation"] == 0 or row.get("final"):
            continue
        parent = previous[row["parent_place"]]
        assert parent["agent"] == row["parent"]
        expected = dict(parent["hyperparameters"])
        if row["mutation"]:
            assert expected[row["mutation"]["name"]] == row["mutation"]["old"]
            expected[row["mutation"]["name"]] = row["mutation"]["new"]
        assert row["hyperparameters"] == expected
        if row["is_elite"]:
            assert row["place"] == 0
            assert row["mutation"] is None
            assert row["agent"] == row["parent"]
    finals = [row for row in lineage if row.get("final")]
    assert len(finals) == 3
    assert sum(row["is_elite"] for row in finals) == 1


def test_the_elite_that_is_saved_is_the_one_that_was_measured(tmp_path):
    env = make_env(train=24)
    pop, fitness = evolve(
        make_population(3), env, checkpoints=True, checkpoint_path=tmp_path / "run", elite_path=tmp_path / "elite"
    )
    best = pop[fitness.index(max(fitness))]
    for folder in (tmp_path / "run", tmp_path / "elite"):
        other = make_population(1)[0]
        other.load_checkpoint(str(folder))
        assert float(other.test(env, loop=None)) == max(fitness)
        assert same(weights(other), weights(best))
    assert read_checkpoint(tmp_path / "run").state["record"]["fitness"][-1] == max(fitness)
    for place, agent in enumerate(pop):
        other = make_population(1)[0]
        other.load_checkpoint(str(tmp_path / "run" / "population" / str(place)))
        assert same(weights(other), weights(agent))


def test_mid_run_checkpoints_hold_the_measured_elite_too(tmp_path):
    env = make_env(train=64)

    class Stop(Exception):
        pass

    selection = TournamentSelection(2, True, 3)
    choose, calls = selection.choose, []

    def third_time_stops(fitnesses):
        calls.append(list(fitnesses))
        if len(calls) == 3:
            raise Stop
        return choose(fitnesses)

    selection.choose = third_time_stops
    pop = make_population(3)
    for agent in pop:
        agent.hp_config = None  # equal batch sizes: a checkpoint falls on every generation
    with pytest.raises(Stop):
        evolve(pop, env, checkpoints=True, checkpoint_path=tmp_path, selection_strategy=selection, checkpoint_steps=16)
    root = read_checkpoint(tmp_path)
    assert root.state["record"]["fitness"][-1] == max(calls[1])
    other = make_population(1)[0]
    other.load_checkpoint(str(tmp_path))
    batches = root.training["eval_batches"]
    assert float(other.test(env, loop=batches)) == pytest.approx(max(calls[1]), abs=1e-7)


def test_same_seed_same_history_byte_for_byte(tmp_path):
    for name in ("a", "b"):
        evolve(make_population(4), make_env(train=40), checkpoints=True, checkpoint_path=tmp_path / name)
    first, second = ((tmp_path / name / "lineage.jsonl").read_bytes() for name in ("a", "b"))
    assert first == second
    assert b"mutation" in first
    evolve(
        make_population(4), make_env(train=40), checkpoints=True, checkpoint_path=tmp_path / "c",
        mutation=Mutations(0.2, 0, 0, 0, 0, 0.8, mutate_elite=False, rand_seed=4),
    )  # fmt: skip
    assert (tmp_path / "c" / "lineage.jsonl").read_bytes() != first


class StopAt:
    """A sink that stops the run after so many training records, as a crash would."""

    def __init__(self, count):
        self.left = count

    def write(self, record):
        self.left -= record["kind"] == "train"
        if self.left == 0:
            raise KeyboardInterrupt

    def close(self):
        pass


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_resumed_population_goes_on_as_if_nothing_had_happened(tmp_path, share):
    def run(folder, **kwargs):
        # Everything fresh, as in a new process.
        pop = make_population(3, dropout=0.1)
        chosen = {"checkpoints": True, "checkpoint_path": tmp_path / folder, "checkpoint_steps": 16, "num_epochs": 2}
        return evolve(pop, make_env(train=30), **(chosen | kwargs))

    counter = StopAt(-1)  # never stops
    straight, fitness = run("straight", sinks=[counter])
    with pytest.raises(KeyboardInterrupt):
        run("cut", sinks=[StopAt(int(share * -(counter.left + 1)))])
    resumed, again = run("cut", resume=True)
    assert again == fitness
    for one, other in zip(straight, resumed, strict=True):
        assert same(weights(one), weights(other))
        assert one.index == other.index
        assert one.mut == other.mut
        assert one.fitness == other.fitness
        assert one.scores == other.scores
        assert winning_settings(one) == winning_settings(other)
        left, right = (agent.optimizer.optimizer.state_dict()["state"] for agent in (one, other))
        assert all(torch.equal(left[key]["exp_avg_sq"], right[key]["exp_avg_sq"]) for key in left)
    lineages = [(tmp_path / name / "lineage.jsonl").read_bytes() for name in ("straight", "cut")]
    assert lineages[0] == lineages[1]


def test_a_finished_population_is_not_trained_again_but_may_go_on(tmp_path):
    def run(**kwargs):
        return evolve(make_population(2), make_env(train=16), checkpoints=True, checkpoint_path=tmp_path, **kwargs)

    _, fitness = run()
    again, same_fitness = run(resume=True)
    assert same_fitness == fitness
    assert [agent.steps for agent in again] == [16, 16]
    further, _ = run(resume=True, num_epochs=2)
    assert [agent.steps for agent in further] == [32, 32]
    assert sum(bool(row.get("final")) for row in read_lineage(tmp_path)) == 2


def test_resuming_something_else_is_refused(tmp_path):
    evolve(make_population(2), make_env(train=16), checkpoints=True, checkpoint_path=tmp_path / "two")
    with pytest.raises(ValueError, match="population of 2, this run has 3"):
        evolve(make_population(3), make_env(train=16), resume=tmp_path / "two")
    with pytest.raises(ValueError, match="made with selection, this run is without"):
        train_llm_dataset(
            make_population(2), make_env(train=16), resume=tmp_path / "two", checkpoints=False, verbose=False
        )
    with pytest.raises(ValueError, match="made with mutation, this run is without"):
        evolve(make_population(2), make_env(train=16), resume=tmp_path / "two", mutation=None, pre_training_mut=False)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        evolve(make_population(2), make_env(train=16), resume=tmp_path / "nothing")
    with pytest.raises(ValueError, match="other training data"):
        evolve(make_population(2), make_env(train=18), resume=tmp_path / "two")


def test_replaced_parents_let_go_of_their_weights():
    import gc
    import weakref

    pop = make_population(4)
    watched = [weakref.ref(p) for agent in pop for p in agent.actor.parameters() if p.requires_grad]
    trained, _ = evolve(pop, make_env(train=64), selection_strategy=TournamentSelection(4, True, 4))
    alive = {id(p) for agent in trained for p in agent.actor.parameters()}
    gc.collect()
    assert all(ref() is None or id(ref()) in alive for ref in watched)
    assert sum(ref() is None for ref in watched) >= len(watched) // 2


def test_mistakes_of_a_population():
    pop, env = make_population(2), make_env(train=16)
    with pytest.raises(ValueError, match="population_size 3, pop has 2"):
        evolve(pop, env, selection_strategy=TournamentSelection(2, True, 3))
    with pytest.raises(ValueError, match=r"architecture=0\.5"):
        evolve(pop, env, mutation=Mutations(0.5, 0.5, 0, 0, 0, 0))
    assert [agent.steps for agent in pop] == [0, 0]


def test_the_table_and_the_file_can_be_read(tmp_path):
    pop, _ = evolve(make_population(2), make_env(train=32), checkpoints=True, checkpoint_path=tmp_path)
    rows = read_lineage(tmp_path)
    table = lineage_table(rows)
    assert table.row_count == len(rows)
    assert winning_settings(pop[0]) == {"lr": pop[0].lr, "batch_size": pop[0].batch_size}
    json.dumps(winning_settings(pop[0]))
    with pytest.raises(ValueError, match="no lineage"):
        read_lineage(tmp_path / "population")
    (tmp_path / "bad.jsonl").write_text('{"generation": 0}\nnonsense\n')
    with pytest.raises(ValueError, match="Line 2"):
        read_lineage(tmp_path / "bad.jsonl")
