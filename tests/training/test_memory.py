"""Generations come and go; memory stays."""

from __future__ import annotations

import gc

import torch

from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.metrics.throughput import resident_memory_gib
from agilerl.training.llm import train_llm_dataset
from tests.training.agents import make_env, make_population


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


class Watch:
    def __init__(self):
        self.evals, self.tensors, self.rss_mib = 0, [], []

    def write(self, record):
        """Look when all four have trained and been measured, so that every member is in the same state."""
        self.evals += record["kind"] == "eval"
        generation, is_last_member = divmod(self.evals, 4)
        if record["kind"] != "eval" or is_last_member:
            return
        self.rss_mib.append(resident_memory_gib() * 1024)
        if generation in (2, 3, 10, 20, 30):  # counting is slow
            self.tensors.append(live_tensors())

    def close(self):
        pass


def test_thirty_generations_of_four_are_flat(tmp_path):
    watch = Watch()
    pop = make_population(4, batch_size=4)
    for agent in pop:
        agent.hp_config = None if agent.hp_config is None else type(agent.hp_config)(lr=agent.hp_config.lr)
    train_llm_dataset(
        pop, make_env(train=31 * 4, test=4), verbose=False, checkpoint_path=tmp_path, checkpoint_steps=40, sinks=[watch],
        tournament=TournamentSelection(2, True, 4), mutation=Mutations(0.2, 0, 0, 0, 0, 0.8, rand_seed=0), evo_steps=1,
        evaluation_interval=None, eval_batches=1,
    )  # fmt: skip
    assert len(watch.tensors) == 5
    assert len(set(watch.tensors)) == 1, str(watch.tensors)
    first, last = (sum(part) / len(part) for part in (watch.rss_mib[5:12], watch.rss_mib[-8:-1]))
    assert last - first < 8.0, str(watch.rss_mib)
