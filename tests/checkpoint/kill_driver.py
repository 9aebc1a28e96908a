"""Trains in processes that are killed, and resumed, until one of them gets to the end.

``python -m tests.checkpoint.kill_driver KIND FOLDER KILLS SEED`` prints one line per process. Everything is imported once
and each process is forked from there with nothing computed yet, so that fifty of them take seconds and not minutes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import agilerl.checkpoint.files as files
from agilerl.algorithms.core.llm import LLMAlgorithm
from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.llm import train_llm_dataset
from tests.training.agents import make_agent, make_env, make_pair_agent, make_pair_env, make_population

KINDS = ("lora", "full", "population", "dpo")
EVENTS = ("learn", "test", "sync", "replace", "write")


def train(kind: str, folder: Path) -> None:
    """A run of two epochs with dropout, accumulation, evaluations and a background save after every step or so."""
    arguments: dict[str, Any] = {
        "num_epochs": 2,
        "evaluation_interval": 2,
        "checkpoint_steps": 8,
        "checkpoint_path": folder / "out",
        "csv": True,
        "csv_log_dir": folder,
        "verbose": False,
        "resume": True,
        "keep_last": 2,
        "keep_best": 1,
        "async_save": True,
    }
    env = make_pair_env(train=44, test=12) if kind == "dpo" else make_env(train=44, test=12)
    pop: list[Any]
    if kind == "population":
        pop = make_population(3, dropout=0.3, micro_batch_size_per_gpu=2)
        arguments |= {
            "evo_steps": 2,
            "tournament": TournamentSelection(2, True, 3, rand_seed=7),
            "mutation": Mutations(0.3, 0, 0, 0, 0, 0.7, rand_seed=7),
            "pre_training_mut": True,
        }
    elif kind == "dpo":
        pop = [make_pair_agent(dropout=0.3, micro_batch_size_per_gpu=2)]
    else:
        pop = [make_agent(lora=kind == "lora", dropout=0.3, micro_batch_size_per_gpu=2)]
    train_llm_dataset(pop, env, **arguments)


def watch(folder: Path, event: Callable[[str], None]) -> None:
    """Note every batch in ``rows.jsonl`` and report what happens to ``event``."""
    sync, replace, write = files.sync_folder, files.replace_link, files.Sink.write
    log = (folder / "rows.jsonl").open("a")

    def noted_learn(learn: Callable[..., Any]) -> Callable[..., Any]:
        def call(agent: LLMAlgorithm, experiences: Any, training: bool = True) -> dict[str, float]:
            event("learn")
            rows = [experiences[name].tolist() for name in sorted(experiences) if name.endswith("input_ids")]
            log.write(json.dumps([agent.index, agent.steps, hashlib.sha256(repr(rows).encode()).hexdigest()]) + "\n")
            log.flush()
            return learn(agent, experiences, training)

        return call

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            event(name)
            return function(*args, **kwargs)

        return call

    for algorithm in (SFT, DPO):
        algorithm.learn = noted_learn(algorithm.learn)  # type: ignore[method-assign]
        algorithm.test = noted("test", algorithm.test)  # type: ignore[method-assign]
    files.Sink.write = noted("write", write)  # type: ignore[method-assign]
    for module in [m for name, m in sys.modules.items() if name.startswith("agilerl.checkpoint")]:
        for name, function in (("sync_folder", noted("sync", sync)), ("replace_link", noted("replace", replace))):
            if hasattr(module, name):
                setattr(module, name, function)


def process(kind: str, folder: Path, kill_at: tuple[str, int] | None) -> None:
    """The body of a forked process; ``kill_at`` is an event and how often it happens before the end comes."""
    left = dict([kill_at]) if kill_at else {}

    def event(name: str) -> None:
        if name in left:
            left[name] -= 1
            if left[name] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / "run.log", level=logging.INFO)
    watch(folder, event)
    train(kind, folder)


def launch(kind: str, folder: Path, *, kill_at: tuple[str, int] | None = None, after_s: float | None = None) -> int:
    """Run one process, killed from within at an event or from here after a while; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            process(kind, folder, kill_at)
            code = 0
        except BaseException:
            logging.exception("the run failed")
        finally:
            os._exit(code)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)  # its own child, not waited for yet: the id cannot be another's
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(kind: str, folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    begin = time.perf_counter()
    _begin(folder / "unbroken")
    _check(launch(kind, folder / "unbroken"))
    whole_s = time.perf_counter() - begin
    print(f"unbroken {whole_s:.1f} s", flush=True)
    runs, done = 0, True
    while kills or not done:
        if done:
            runs += 1
            _begin(folder / f"broken-{runs}")
        place: dict[str, Any] = {}
        if kills % 2:
            place = {"kill_at": (chance.choice(EVENTS), chance.randint(1, 12))}
        elif kills:
            place = {"after_s": chance.uniform(0.1, 0.8) * whole_s}
        code = launch(kind, folder / f"broken-{runs}", **place)
        print(f"run {runs} {place} -> {code}", flush=True)
        _check(code)
        done = code == 0
        kills -= code == -signal.SIGKILL


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True)


def _check(code: int) -> None:
    if code not in (0, -signal.SIGKILL):
        sys.exit("a run failed by itself; see run.log")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
