"""What each rank of ``test_ranks`` runs: an evolving population, saved, then resumed with a larger budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.distributed import get_rank, get_world_size
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.llm import train_llm_dataset
from tests.training.agents import make_env, make_population


def evolve(folder: Path, epochs: int, resume: bool, seed: int | None) -> dict[str, object]:
    lr = RLParameter(1e-4, 1e-1, shrink_factor=0.5, grow_factor=2.0)
    more = {} if seed is not None else {"batch_size": RLParameter(2, 16, dtype=int)}
    ranges = HyperparameterConfig(lr=lr, **more)
    pop = make_population(3, hp_config=ranges)
    env = make_env(train=21, test=5, rank=get_rank(), world_size=get_world_size(), batch=8 // get_world_size())
    pop, fitness = train_llm_dataset(
        pop, env, num_epochs=epochs, evo_steps=2, checkpoint_path=folder, checkpoint_steps=8, resume=resume, verbose=False,
        tournament=TournamentSelection(2, True, 3), mutation=Mutations(0.2, 0, 0, 0, 0, 0.8, rand_seed=seed),
        pre_training_mut=True,
    )  # fmt: skip
    settings = [(agent.index, agent.lr, agent.batch_size, agent.steps) for agent in pop]
    weights = [
        sum(float(p.detach().double().sum()) for p in agent.actor.parameters() if p.requires_grad) for agent in pop
    ]
    return {"fitness": fitness, "settings": settings, "weights": weights}


def main(folder: Path) -> None:
    # Without a seed the ranks would draw differently if rank 0 did not decide for all.
    seeds = {"seeded": 3, "free": None}
    results = {name: evolve(folder / name, 1, False, seed) for name, seed in seeds.items()}
    results["resumed"] = evolve(folder / "seeded", 2, True, 3)
    (folder / f"rank{get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
