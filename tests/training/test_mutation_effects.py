"""A mutated hyper-parameter counts in the next ``learn``, shown by what that call does."""

from __future__ import annotations

import pytest
import torch

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.optim import CosineLRScheduleConfig
from agilerl.training.llm import train_llm_dataset
from tests.training.agents import make_agent, make_env


def mutated(agent, name: str, low, high):
    """Move one hyper-parameter of ``agent`` from ``low`` to ``high`` through ``Mutations``."""
    setattr(agent, name, low)
    kind = int if isinstance(low, int) else float
    agent.hp_config = HyperparameterConfig(
        **{name: RLParameter(low, high, shrink_factor=1e-6, grow_factor=high / low * 10, dtype=kind)}
    )
    Mutations(0, 0, 0, 0, 0, 1, rand_seed=0).mutation([agent])
    assert getattr(agent, name) == high
    assert agent.mut == name


def batch(rows: int = 8):
    return make_env(train=rows).take(rows)


def weights(agent) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.actor.parameters() if p.requires_grad])


def count_steps(agent) -> list[int]:
    steps: list[int] = []
    agent.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def count_forwards(agent) -> list[int]:
    rows: list[int] = []
    backbone = agent.actor.get_base_model().base_model
    backbone.register_forward_pre_hook(lambda *_: rows.append(1))
    return rows


def test_lr():
    moved = []
    for mutate in (False, True):
        agent = make_agent(lr=1e-4)
        agent.learn(batch())
        if mutate:
            mutated(agent, "lr", 1e-4, 4e-4)
            assert {group["lr"] for group in agent.optimizer.optimizer.param_groups} == {4e-4}
        before = weights(agent)
        agent.learn(batch())
        assert {group["lr"] for group in agent.optimizer.optimizer.param_groups} == {agent.lr}
        moved.append((weights(agent) - before).abs().max().item())
    assert moved[1] == pytest.approx(4 * moved[0], rel=1e-3)


def test_lr_is_the_peak_of_the_schedule():
    agent = make_agent(lr=1e-4, cosine_lr_schedule_config=CosineLRScheduleConfig(num_steps=4))
    agent.learn(batch())
    share = agent.current_lr / agent.lr
    mutated(agent, "lr", 1e-4, 4e-4)
    assert agent.current_lr == pytest.approx(4e-4 * share)
    assert agent.lr_schedule_step == 1


def test_all_parameter_groups_keep_their_own_part():
    agent = make_agent(lr=1e-4, lora_plus_ratio=4.0, weight_decay=0.1)
    groups = agent.optimizer.optimizer.param_groups
    before = [(len(group["params"]), group["weight_decay"], group["lr"]) for group in groups]
    mutated(agent, "lr", 1e-4, 4e-4)
    agent.learn(batch())
    groups = agent.optimizer.optimizer.param_groups
    assert len(groups) == len(before) >= 2
    after = [(len(group["params"]), group["weight_decay"], group["lr"]) for group in groups]
    assert after == [(count, decay, pytest.approx(4 * lr)) for count, decay, lr in before]


def test_mutated_groups_survive_saving(tmp_path):
    def agent():
        return make_agent(lr=1e-4, lora_plus_ratio=4.0, weight_decay=0.1)

    first, second = agent(), agent()
    first.learn(batch())
    mutated(first, "lr", 1e-4, 4e-4)
    first.learn(batch())
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path, load_optimizer=True)
    for one in (first, second):
        one.learn(batch())
    rates = [[group["lr"] for group in one.optimizer.optimizer.param_groups] for one in (first, second)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 2
    assert torch.equal(weights(first), weights(second))


def test_batch_size():
    agent = make_agent(batch_size=4)
    mutated(agent, "batch_size", 4, 10)
    steps, seen = count_steps(agent), []
    learn = agent.learn
    agent.__dict__["learn"] = lambda rows: (seen.append(len(rows["prompt"])), learn(rows))[1]
    train_llm_dataset([agent], make_env(train=20), verbose=False, checkpoints=False)
    assert seen == [10, 10]
    assert len(steps) == 2  # and the unset mini-batch follows: one optimizer step each


def test_mini_batch_size():
    agent = make_agent(batch_size=8)
    mutated(agent, "mini_batch_size", 2, 4)
    steps = count_steps(agent)
    agent.learn(batch())
    assert len(steps) == 2


def test_micro_batch_size_per_gpu():
    agent = make_agent(batch_size=8)
    mutated(agent, "micro_batch_size_per_gpu", 2, 4)
    forwards = count_forwards(agent)
    agent.learn(batch())
    assert len(forwards) == 2
    agent.micro_batch_size_per_gpu = 1
    agent.learn(batch())
    assert len(forwards) == 10


def test_update_epochs():
    agent = make_agent()
    mutated(agent, "update_epochs", 1, 3)
    steps = count_steps(agent)
    agent.learn(batch())
    assert len(steps) == 3


def test_max_grad_norm():
    agent = make_agent()
    mutated(agent, "max_grad_norm", 1e-4, 1e-3)
    norms = []
    agent.optimizer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(
            torch.stack([p.grad.norm() for p in agent.actor.parameters() if p.grad is not None]).norm()
        )
    )
    metrics = agent.learn(batch())
    assert metrics["grad_norm"] > 1e-3
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-4)


def test_two_hundred_mutations_of_a_real_agent_leave_it_able_to_learn():
    ranges = HyperparameterConfig(
        lr=RLParameter(1e-5, 1e-2),
        batch_size=RLParameter(2, 12, dtype=int),
        mini_batch_size=RLParameter(1, 8, dtype=int),
        micro_batch_size_per_gpu=RLParameter(1, 8, dtype=int),
        update_epochs=RLParameter(1, 3, dtype=int),
        max_grad_norm=RLParameter(0.01, 10.0),
    )
    agent = make_agent(hp_config=ranges)
    mutate = Mutations(0, 0, 0, 0, 0, 1, rand_seed=1)
    seen = set()
    for turn in range(200):
        before = {name: getattr(agent, name) for name in ranges.names()}
        mutate.mutation([agent])
        seen.add(agent.mut)
        parameter = ranges[agent.mut]
        raw = agent.inspect_attributes(agent)["batch_size"] if agent.mut == "batch_size" else ranges[agent.mut].value
        assert parameter.min <= raw <= parameter.max
        assert isinstance(raw, parameter.dtype)
        if parameter.dtype is int and before[agent.mut] is not None:
            assert raw != before[agent.mut]
        if turn % 50 == 0:
            agent.learn(batch(agent.batch_size))
    assert seen == set(ranges.names())
