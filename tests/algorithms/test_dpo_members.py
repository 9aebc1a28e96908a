"""Every documented member of ``DPO``: it exists as documented, and works on pairs."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from peft import LoraConfig

from agilerl.algorithms import DPO
from agilerl.algorithms.core.base import EvolvableAlgorithm
from agilerl.algorithms.core.optimizer_wrapper import OptimizerWrapper
from agilerl.algorithms.core.registry import NetworkGroup, make_default_hp_config
from agilerl.utils.algo_utils import CosineLRScheduleConfig
from tests.algorithms.test_documented_surface import (
    CLASS,
    CONSTRUCTOR,
    METHODS,
    READ_ONLY,
    SETTABLE,
    STATIC,
    parameters,
)
from tests.algorithms.test_dpo import make_pairs
from tests.algorithms.test_members import equal, weights
from tests.helpers import tiny_model
from tests.training.agents import TOKENIZER, make_pair_agent, make_pair_env

OURS = {"lr": 5e-6, "use_separate_reference_adapter": True}
EXTRA = {"beta": 0.1, "nll_alpha": 1.0}
RESULTS = {"loss", "chosen_reward", "rejected_reward", "reward_margin", "accuracy"}


def pairs() -> dict:
    return make_pair_env().take(8)


def reference(agent: DPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in agent._resources.adapters.read("reference").items()}


def test_the_surface_is_that_of_sft() -> None:
    found = inspect.signature(DPO).parameters
    wanted = CONSTRUCTOR | OURS | EXTRA
    assert {name: found[name].default for name in list(found)[: len(wanted)]} == wanted
    assert list(found)[: len(wanted)] == list(wanted)
    assert all(found[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(found)[len(wanted) :])
    for name, expected in METHODS.items():
        assert parameters(getattr(DPO, name)) == expected, name
        assert getattr(DPO, name).__doc__
    assert all(isinstance(inspect.getattr_static(DPO, name), staticmethod) for name in STATIC)
    assert all(isinstance(inspect.getattr_static(DPO, name), classmethod) for name in CLASS)
    for name in READ_ONLY + SETTABLE:
        assert (inspect.getattr_static(DPO, name).fset is not None) == (name in SETTABLE)


def test_learn_and_test() -> None:
    agent = make_pair_agent()
    still = weights(agent)
    measured = agent.learn(pairs(), training=False)
    assert measured.keys() >= RESULTS
    assert equal(weights(agent), still)
    metrics = agent.learn(pairs())
    assert metrics["loss"] == pytest.approx(math.log(2) + metrics["nll"], abs=1e-6)
    assert metrics.keys() >= RESULTS | {"grad_norm"} | {f"learn_phase_{p}_s" for p in ("forward", "backward", "optim")}
    assert not equal(weights(agent), still)
    margin = agent.test(make_pair_env(), loop=None)
    assert margin.shape == ()
    assert agent.fitness == [float(margin)]
    assert float(margin) == pytest.approx(agent.evaluate(make_pair_env())["reward_margin"], rel=1e-6)
    with pytest.raises(NotImplementedError):
        agent.get_action()


def test_history_and_training_blocks() -> None:
    agent = make_pair_agent(index=2)
    agent.add_scores([1.0])
    agent.fitness, agent.mut, agent.index = [0.5], "lr", 3
    agent.init_training_step(capture_grama=True)
    agent.learn(pairs())
    agent.finalize_training_step(8)
    assert (agent.scores, agent.fitness, agent.mut, agent.index, agent.steps) == ([1.0], [0.5], "lr", 3, 8)
    assert agent.grama_scores
    assert all(values.mean() == pytest.approx(1.0, rel=1e-4) for values in agent.grama_scores.values())
    agent.hp_config = make_default_hp_config(lr=1e-3, beta=0.1)
    assert agent.hp_config.names() == ["lr", "beta"]


def test_rates_and_optimizer() -> None:
    agent = make_pair_agent(lr=1e-3, cosine_lr_schedule_config=CosineLRScheduleConfig(10, 0.2))
    assert agent.current_lr == agent.current_lr_critic == pytest.approx(5e-4)
    agent.learn(pairs())
    assert (agent.lr_schedule_step, agent.current_lr) == (1, pytest.approx(1e-3))
    agent.lr = 4e-3
    agent.apply_lr()
    assert agent.optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(4e-3)
    assert DPO.update_lr(agent.optimizer, 2e-3) is None
    assert isinstance(agent.optimizer, OptimizerWrapper)
    assert agent.get_lr_names() == ["lr"]
    agent.reinit_optimizers()
    assert agent.optimizer.optimizer.state_dict()["state"] == {}
    agent.configure_batch_size_per_process(12, 3, None)
    assert (agent.batch_size, agent.gradient_accumulation_steps) == (12, 4)


def test_networks(caplog) -> None:
    agent = make_pair_agent()
    assert agent.get_policy() is agent.actor
    assert list(agent.evolvable_attributes(networks_only=True).values()) == [agent.actor]
    assert agent.eval_policy_network_ids() == {id(agent.actor)}
    assert [network for _, network in agent.unrolled_eval_networks()] == [agent.actor]
    policy, rest = agent.get_eval_modules(cloning=True)
    assert next(iter(policy.values())) is not agent.actor
    assert rest == {}
    agent.probe = torch.nn.Linear(2, 2)
    agent.register_network_group(NetworkGroup("probe"))
    assert set(agent.evolvable_attributes(networks_only=True)) == {"actor", "probe"}
    calls = []
    agent.register_mutation_hook(lambda: calls.append(1))
    agent.mutation_hook()
    assert calls == [1]
    agent.recompile()
    assert "CUDA" in caplog.text
    agent.set_training_mode(False)
    assert not agent.actor.training
    agent.unwrap_models()
    agent.wrap_models()
    agent.learn(pairs())
    agent.clean_up()
    assert not hasattr(agent, "actor")


def test_statics_and_devices() -> None:
    agent = make_pair_agent()
    assert DPO.get_state_dim(spaces.Box(-1, 1, (3,))) == (3,)
    assert DPO.get_action_dim(spaces.Discrete(4)) == 4
    value = np.zeros(2)
    assert agent.preprocess_observation(value) is value
    assert agent.to_device(torch.ones(1))[0].device.type == "cpu"
    assert DPO.inspect_attributes(agent, input_args_only=True)["beta"] == 0.1
    twin = make_pair_agent()
    agent.note = "kept"
    assert EvolvableAlgorithm.copy_attributes(agent, twin).note == "kept"


def test_adapters_and_the_reference(tmp_path) -> None:
    agent = make_pair_agent()
    agent.learn(pairs())
    before = reference(agent)
    agent.use_adapter("reference")
    agent.use_adapter("actor")
    with agent.select_adapter("reference"):
        assert agent.actor.active_adapter == "reference"
    assert agent.actor.active_adapter == "actor"
    with pytest.raises(ValueError, match="critic"):
        agent.use_adapter("critic")
    agent.set_reference_policy(1)
    assert not equal(reference(agent), before)
    assert equal(reference(agent), agent._resources.adapters.read("actor"))
    agent.save_checkpoint(tmp_path)
    other = make_pair_agent()
    other.update_existing_adapter(str(tmp_path), "actor")
    assert equal(other._resources.adapters.read("actor"), agent._resources.adapters.read("actor"))


def test_checkpoints(tmp_path) -> None:
    tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "base")
    agent = make_pair_agent(actor_network=None, model_name=str(tmp_path / "base"), beta=0.3)
    for _ in range(2):
        agent.learn(pairs())
    agent.save_checkpoint(tmp_path / "saved")
    agent.snapshot_checkpoint().write(tmp_path / "snapshot")
    loaded = DPO.load(str(tmp_path / "saved"))
    assert (loaded.beta, loaded.lr) == (0.3, agent.lr)
    fresh = make_pair_agent(actor_network=None, model_name=str(tmp_path / "base"))
    fresh.load_checkpoint(tmp_path / "snapshot", load_optimizer=True)
    taken = make_pair_agent(actor_network=None, model_name=str(tmp_path / "base"), beta=0.3)
    taken.load_weights(tmp_path / "saved")
    for other in (loaded, fresh, taken):
        assert equal(reference(other), reference(agent))
        assert other.learn(pairs(), training=False) == pytest.approx(agent.learn(pairs(), training=False))
    fresh.learn(pairs())
    agent.learn(pairs())
    assert equal(weights(fresh), weights(agent))
    taken.load_weights(tmp_path / "saved", overwrite_reference_adapter=True)
    assert equal(reference(taken), taken._resources.adapters.read("actor"))
    assert taken.learn(pairs(), training=False)["reward_margin"] == 0.0


def test_clones_and_populations() -> None:
    agent = make_pair_agent(beta=0.3)
    agent.learn(pairs())
    twin = agent.clone(index=5)
    assert (twin.index, twin.beta) == (5, 0.3)
    for one in (agent, twin):
        one.learn(pairs())
    assert equal(weights(twin), weights(agent))
    config = LoraConfig(r=4, target_modules=["q_proj"])
    arguments = {"pad_token_id": 0, "pad_token": "<pad>", "actor_network": tiny_model("llama"), "lora_config": config}
    population = DPO.population(2, **arguments)
    assert [one.index for one in population] == [0, 1]
    assert all(one.learn(make_pairs())["reward_margin"] == 0.0 for one in population)
