"""What each documented member does, seen from outside."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from peft import LoraConfig

from agilerl.algorithms import SFT
from agilerl.algorithms.core.base import EvolvableAlgorithm
from agilerl.algorithms.core.optimizer_wrapper import OptimizerWrapper
from agilerl.algorithms.core.registry import NetworkGroup, OptimizerConfig, make_default_hp_config
from agilerl.utils.algo_utils import CosineLRScheduleConfig
from tests.helpers import tiny_model
from tests.training.agents import TOKENIZER, make_agent, make_env


def batch(rows: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(TOKENIZER), (rows, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [3] * rows}


def weights(agent) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in agent.actor.named_parameters() if p.requires_grad}


def moments(agent) -> list[torch.Tensor]:
    state = agent.optimizer.optimizer.state_dict()["state"]
    return [state[key][name].clone() for key in sorted(state) for name in sorted(state[key])]


def equal(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


# -- history and identity ------------------------------------------------------------------------------------------------


def test_add_scores_and_scores():
    agent = make_agent()
    agent.add_scores([1.0, 2])
    agent.add_scores([[3.0, 4.0]])
    assert agent.scores == [1.0, 2.0, [3.0, 4.0]]
    agent.scores = [5.0]
    assert agent.scores == [5.0]


def test_fitness_index_mut_and_steps_can_be_set():
    agent = make_agent(index=3)
    assert (agent.index, agent.fitness, agent.mut, agent.steps) == (3, [], None, 0)
    agent.index, agent.fitness, agent.mut, agent.steps = 5, [1.0], "lr", 7
    assert (agent.index, agent.fitness, agent.mut, agent.steps) == (5, [1.0], "lr", 7)


def test_training_blocks_count_rows():
    agent = make_agent()
    agent.init_training_step()
    agent.finalize_training_step(16)
    agent.init_training_step()
    agent.init_training_step()  # closes the one left open
    agent.finalize_training_step(4)
    assert agent.steps == 20
    with pytest.raises(ValueError, match="num_steps"):
        agent.finalize_training_step(-1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_grama_scores(checkpointing):
    agent = make_agent(lora=False, gradient_checkpointing=checkpointing, max_grad_norm=None)
    agent.init_training_step(capture_grama=True)
    agent.learn(batch())
    agent.finalize_training_step(8)
    scores = agent.grama_scores
    name = "model.layers.0.self_attn.q_proj"
    assert scores[name].shape == (agent.actor.get_submodule(name).out_features,)
    for values in scores.values():
        assert torch.isfinite(values).all()
        assert values.mean() == pytest.approx(1.0, rel=1e-5)
    before = {name: values.clone() for name, values in scores.items()}
    agent.init_training_step()
    agent.learn(batch(seed=1))
    agent.finalize_training_step(8)
    assert equal(before, agent.grama_scores)  # off by default: no new capture, no hooks left


def test_hp_config_names_must_be_mutable():
    agent = make_agent(hp_config=make_default_hp_config(lr=1e-3))
    assert agent.hp_config.names() == ["lr"]
    agent.hp_config = None
    assert not agent.hp_config
    with pytest.raises(ValueError, match=r"gamma, which SFT cannot mutate; it can: batch_size, lr"):
        agent.hp_config = make_default_hp_config(gamma=0.9)


# -- learning rate -------------------------------------------------------------------------------------------------------


def test_the_schedule_is_live():
    schedule = CosineLRScheduleConfig(num_steps=10, warmup_proportion=0.2)
    agent = make_agent(lr=1.0e-3, cosine_lr_schedule_config=schedule)
    rates = []
    for _ in range(11):
        assert agent.current_lr_critic == agent.current_lr
        assert agent.lr_schedule_step == len(rates)
        rates.append(agent.current_lr)
        agent.learn(batch(2))
    wanted = [0.5, 1, 1, 0.966, 0.868, 0.722, 0.55, 0.378, 0.232, 0.134, 0.1]
    assert rates == pytest.approx([1e-3 * share for share in wanted], abs=5e-7)
    agent.lr = 5e-3
    agent.apply_lr()
    assert agent.current_lr == pytest.approx(5e-4)
    assert {group["lr"] for group in agent.optimizer.optimizer.param_groups} == {agent.current_lr}
    assert make_agent().lr_schedule_step == 0


def test_update_lr_sets_peaks_and_builds_a_schedule():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = make_agent().optimizer
    assert SFT.update_lr(optimizer, 3e-4) is None
    assert {group["lr"] for group in optimizer.optimizer.param_groups} == {3e-4}
    scheduler = SFT.update_lr(optimizer, (2e-3, None), CosineLRScheduleConfig(num_steps=10), schedule_step=10)
    assert scheduler is not None
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)
    optimizer.optimizer.add_param_group({"params": parameters, "role": "critic"})
    SFT.update_lr(optimizer, (1e-3, 7e-3))
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [1e-3, 7e-3]


def test_get_lr_names():
    assert make_agent().get_lr_names() == ["lr"]


def test_reinit_optimizers_really_starts_anew():
    agent = make_agent()
    for _ in range(3):
        agent.learn(batch())
    fresh_weights = weights(agent)
    old = agent.optimizer.optimizer
    agent.reinit_optimizers()
    assert agent.optimizer.optimizer is not old
    assert not moments(agent)
    agent.learn(batch(seed=1))
    steps = [float(s["step"]) for s in agent.optimizer.optimizer.state.values()]
    assert set(steps) == {1.0}
    assert not equal(fresh_weights, weights(agent))
    agent.reinit_optimizers(agent.registry.optimizers[0])
    assert not moments(agent)
    with pytest.raises(ValueError, match="no optimizer 'critic'"):
        agent.reinit_optimizers(OptimizerConfig("critic", "actor", "lr", torch.optim.AdamW, {}))


# -- registry and networks -----------------------------------------------------------------------------------------------


def test_networks_and_optimizers_by_name():
    agent = make_agent()
    assert set(agent.evolvable_attributes()) == {"actor", "optimizer"}
    assert isinstance(agent.evolvable_attributes()["optimizer"], OptimizerWrapper)
    assert agent.evolvable_attributes(networks_only=True) == {"actor": agent.actor}
    assert agent.get_policy() is agent.actor
    assert agent.eval_policy_network_ids() == {id(agent.actor)}
    assert agent.unrolled_eval_networks() == [("actor", agent.actor)]


def test_register_network_group():
    agent = make_agent()
    agent.probe = torch.nn.Linear(2, 2)
    agent.register_network_group(NetworkGroup("probe"))
    assert set(agent.evolvable_attributes(networks_only=True)) == {"actor", "probe"}
    assert agent.get_policy() is agent.actor
    policy, others = agent.get_eval_modules(cloning=False)
    assert (policy, others) == ({"actor": agent.actor}, {"probe": agent.probe})
    with pytest.raises(ValueError, match="registered already"):
        agent.register_network_group(NetworkGroup("actor"))


def test_get_eval_modules_gives_independent_copies():
    agent = make_agent()
    agent.learn(batch())
    policy, others = agent.get_eval_modules()
    assert others == {}
    copied = policy["actor"]
    assert copied is not agent.actor
    ids = batch()["input_ids"]
    with torch.no_grad():
        before = copied.eval()(ids).logits
        assert torch.equal(before, agent.actor.eval()(ids).logits)
    agent.learn(batch(seed=1))
    with torch.no_grad():
        assert torch.equal(before, copied(ids).logits)


def test_mutation_hooks_follow_the_agent_they_run_on():
    class Hooked(SFT):
        def after(self):
            self.calls = getattr(self, "calls", 0) + 1

    source = make_agent()
    agent = Hooked(
        TOKENIZER.eos_token_id, TOKENIZER.eos_token, actor_network=tiny_model("llama", vocab_size=len(TOKENIZER)),
        lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )  # fmt: skip
    agent.register_mutation_hook(agent.after)
    seen = []
    agent.register_mutation_hook(lambda: seen.append(1))
    twin = agent.clone()
    twin.mutation_hook()
    assert twin.calls == 1
    assert not hasattr(agent, "calls")
    assert seen == [1]
    source.mutation_hook()  # none registered: nothing happens
    with pytest.raises(ValueError, match="callable or a method name"):
        agent.register_mutation_hook(3)


def test_recompile_says_where_it_does_not_help(caplog):
    agent = make_agent()
    before = agent.learn(batch(), training=False)["loss"]
    agent.recompile()
    assert "CUDA" in caplog.text
    assert agent.learn(batch(), training=False)["loss"] == before


# -- attribute views -----------------------------------------------------------------------------------------------------


def test_inspect_attributes():
    agent = make_agent(lr=2e-3)
    agent.note = {"why": "test"}
    everything = SFT.inspect_attributes(agent)
    assert everything["note"] == {"why": "test"}
    assert everything["lr"] == 2e-3
    assert not any(
        isinstance(value, (torch.nn.Module, torch.optim.Optimizer, OptimizerWrapper)) for value in everything.values()
    )
    arguments = SFT.inspect_attributes(agent, input_args_only=True)
    assert "note" not in arguments
    assert {"lr", "batch_size", "index", "seed", "pad_token_id", "hp_config"} <= set(arguments)
    assert "lr" not in SFT.inspect_attributes(agent, exclude=["lr"])


def test_copy_attributes():
    agent, other = make_agent(), make_agent(index=4)
    agent.lr, agent.note, agent.fitness, agent.steps = 7e-3, ["a"], [1.0], 9
    assert EvolvableAlgorithm.copy_attributes(agent, other, exclude=["steps"]) is other
    assert (other.lr, other.note, other.fitness, other.steps, other.index) == (7e-3, ["a"], [1.0], 0, 4)
    other.note.append("b")
    assert agent.note == ["a"]


def test_attributes_of_a_user_are_cloned_and_saved(tmp_path):
    agent = make_agent()
    agent.note = {"run": 3, "tensor": torch.ones(2)}
    agent.helper = object()  # not plain data: cloned, not saved
    twin = agent.clone()
    assert twin.note["run"] == 3
    agent.note["run"] = 4
    assert twin.note["run"] == 3
    agent.save_checkpoint(tmp_path)
    other = make_agent()
    other.load_checkpoint(tmp_path)
    assert other.note["run"] == 4
    assert not hasattr(other, "helper")
    del agent.note
    with pytest.raises(AttributeError, match="note"):
        _ = agent.note


# -- sizes ---------------------------------------------------------------------------------------------------------------


def count_steps(agent) -> list[int]:
    steps = []
    agent.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def test_configure_batch_size_per_process():
    agent = make_agent(batch_size=8)
    steps = count_steps(agent)
    agent.configure_batch_size_per_process(batch_size=12, micro_batch_size_per_gpu=2, mini_batch_size=4)
    assert (agent.batch_size, agent.mini_batch_size, agent.micro_batch_size_per_gpu) == (12, 4, 2)
    assert agent.gradient_accumulation_steps == 2
    agent.learn(batch(12))
    assert len(steps) == 3
    agent.configure_batch_size_per_process(12, 5, 7)  # need not divide
    agent.learn(batch(12))
    assert len(steps) == 5
    for bad in ((0, None, None), (8, 0, None), (8, None, -1)):
        with pytest.raises(ValueError, match="at least 1"):
            agent.configure_batch_size_per_process(*bad)


# -- learn, test, modes --------------------------------------------------------------------------------------------------


def test_learn_without_training_changes_nothing():
    agent = make_agent(dropout=0.5)
    agent.learn(batch())
    before, mode = weights(agent), agent.actor.training
    first, second = (agent.learn(batch(), training=False) for _ in range(2))
    assert first["loss"] == second["loss"]
    assert equal(before, weights(agent))
    assert agent.actor.training == mode


def test_test_reads_the_same_rows_and_weighs_by_token():
    agent, env = make_agent(), make_env(test=10, batch=4)
    one = agent.test(env)
    assert isinstance(one, np.ndarray)
    assert one.shape == ()
    assert float(agent.test(env, loop=1)) == float(one)
    whole = float(agent.test(env, loop=None))
    assert float(agent.test(make_env(test=10, batch=3), loop=None)) == pytest.approx(whole, abs=1e-6)
    assert float(agent.test(make_env(test=10, batch=1), loop=None)) == pytest.approx(whole, abs=1e-6)
    assert float(agent.test(env, loop=99)) == pytest.approx(whole, abs=1e-6)
    assert len(agent.fitness) == 6
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="loop"):
            agent.test(env, loop=bad)


def test_set_training_mode_reaches_the_network():
    agent = make_agent()
    agent.set_training_mode(False)
    assert not any(module.training for module in agent.actor.modules())
    agent.set_training_mode(True)
    assert agent.actor.training


def test_get_action_is_not_for_data_sets():
    with pytest.raises(NotImplementedError, match=r"actor\.generate"):
        make_agent().get_action(None)


def test_preprocess_observation_and_to_device():
    agent = make_agent()
    observation = torch.ones(2)
    assert agent.preprocess_observation(observation) is observation
    moved = agent.to_device(observation, {"a": torch.zeros(1)}, [torch.ones(1)])
    assert isinstance(moved, tuple)
    assert torch.equal(moved[0], observation)
    assert moved[1]["a"].device.type == "cpu"


def test_dimensions_of_spaces():
    box, discrete = spaces.Box(-1, 1, (3, 4)), spaces.Discrete(5)
    assert SFT.get_state_dim(box) == (3, 4)
    assert SFT.get_state_dim([box, box]) == ((3, 4), (3, 4))
    assert SFT.get_state_dim(spaces.Dict({"a": box})) == {"a": (3, 4)}
    assert SFT.get_action_dim(discrete) == 5
    assert SFT.get_action_dim(spaces.Box(-1, 1, (2,))) == 2
    assert SFT.get_action_dim([discrete, discrete]) == (5, 5)


# -- wrapping ------------------------------------------------------------------------------------------------------------


def test_wrap_and_unwrap():
    agent = make_agent(wrap=False)
    assert agent.optimizer is None
    with pytest.raises(ValueError, match="wrap_models"):
        agent.learn(batch())
    agent.wrap_models()
    agent.learn(batch())
    before = weights(agent)
    agent.unwrap_models()
    assert agent.optimizer is None
    assert equal(before, weights(agent))
    agent.wrap_models()
    straight = make_agent()
    straight.learn(batch())
    for one in (agent, straight):
        one.learn(batch(seed=1))
    assert equal(weights(agent), weights(straight))


def test_clean_up_lets_go():
    import gc
    import weakref

    agent = make_agent()
    agent.learn(batch())
    watched = weakref.ref(next(p for p in agent.actor.parameters() if p.requires_grad))
    agent.clean_up()
    gc.collect()
    assert watched() is None


# -- adapters ------------------------------------------------------------------------------------------------------------


def test_adapters_by_role():
    agent = make_agent(use_separate_reference_adapter=True)
    agent.learn(batch())
    ids = batch()["input_ids"]

    def logits():
        with torch.no_grad():
            return agent.actor.eval()(ids).logits

    actor = logits()
    with agent.select_adapter("reference"):
        reference = logits()
        assert not any(p.requires_grad for n, p in agent.actor.named_parameters() if ".reference." in n)
    assert not torch.equal(actor, reference)
    assert torch.equal(logits(), actor)
    with pytest.raises(RuntimeError, match="inside"), agent.select_adapter("reference"):
        raise RuntimeError("inside")
    assert torch.equal(logits(), actor)
    agent.use_adapter("reference")
    assert torch.equal(logits(), reference)
    agent.use_adapter("actor")
    assert all(p.requires_grad for n, p in agent.actor.named_parameters() if ".actor." in n)
    for name in ("critic", "nobody"):
        with pytest.raises(ValueError, match="actor"):
            agent.use_adapter(name)
        with pytest.raises(ValueError, match="actor"), agent.select_adapter(name):
            pass
    with pytest.raises(ValueError, match="no adapters"):
        make_agent(lora=False).use_adapter("actor")


def test_set_reference_policy_follows_the_tracker(caplog):
    agent = make_agent(use_separate_reference_adapter=True)
    ids = batch()["input_ids"]

    def reference():
        with torch.no_grad(), agent.select_adapter("reference"):
            return agent.actor.eval()(ids).logits

    start = reference()
    agent.learn(batch())
    agent.set_reference_policy(0)
    assert torch.equal(reference(), start)
    agent.set_reference_policy(1)
    moved = reference()
    assert not torch.equal(moved, start)
    agent.learn(batch(seed=1))
    agent.set_reference_policy(1)
    assert torch.equal(reference(), moved)
    plain = make_agent()
    plain.set_reference_policy(1)
    plain.set_reference_policy(2)
    assert caplog.text.count("cannot move") <= 1


def test_update_existing_adapter_writes_in_place(tmp_path):
    agent, other = make_agent(), make_agent(use_separate_reference_adapter=True)
    agent.learn(batch())
    agent.save_checkpoint(tmp_path)
    parameter = next(p for n, p in other.actor.named_parameters() if "lora_B.reference" in n)
    other.update_existing_adapter(str(tmp_path), "reference")
    assert parameter.abs().sum() > 0
    with torch.no_grad(), other.select_adapter("reference"):
        logits = other.actor.eval()(batch()["input_ids"]).logits
    with torch.no_grad():
        assert torch.allclose(logits, agent.actor.eval()(batch()["input_ids"]).logits, atol=1e-6)
    assert next(p for n, p in other.actor.named_parameters() if "lora_B.reference" in n) is parameter
    with pytest.raises(ValueError, match="critic"):
        other.update_existing_adapter(str(tmp_path), "critic")


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def test_save_and_load_go_on_bit_for_bit(tmp_path):
    agent = make_agent(dropout=0.1)
    agent.learn(batch())
    agent.save_checkpoint(tmp_path)
    other = make_agent(dropout=0.1, seed=7)
    other.load_checkpoint(tmp_path, load_optimizer=True)
    for one in (agent, other):
        one.learn(batch(seed=1))
    assert equal(weights(agent), weights(other))
    assert equal(moments(agent), moments(other))


def test_loading_without_moments_warns(tmp_path):
    agent = make_agent()
    agent.learn(batch())
    agent.save_checkpoint(tmp_path, save_optimizer=False)
    other = make_agent()
    with pytest.warns(UserWarning, match="save_optimizer=False"):
        other.load_checkpoint(tmp_path, load_optimizer=True)
    assert not moments(other)


def test_restore_config_and_hyperparameters(tmp_path):
    ranges = make_default_hp_config(lr=1e-3)
    agent = make_agent(lr=1e-3, hp_config=ranges)
    agent.learn(batch())
    agent.steps = 8
    agent.save_checkpoint(tmp_path)

    def loaded(**kwargs):
        other = make_agent(lr=5e-3, batch_size=4, hp_config=make_default_hp_config(lr=1e-3))
        other.load_checkpoint(tmp_path, **kwargs)
        return other.lr, other.batch_size, other.steps

    assert loaded() == (1e-3, 8, 8)
    assert loaded(restore_config=False) == (1e-3, 4, 8)
    assert loaded(restore_config=False, restore_hyperparameters=False) == (5e-3, 4, 8)
    assert loaded(restore_hyperparameters=False)[0] == 5e-3


def test_load_weights_takes_weights_only(tmp_path):
    agent = make_agent()
    agent.learn(batch())
    agent.steps = 8
    agent.save_checkpoint(tmp_path)
    other = make_agent(lr=5e-3)
    other.load_weights(tmp_path)
    assert equal(weights(agent), weights(other))
    assert (other.lr, other.steps) == (5e-3, 0)
    with pytest.raises(ValueError, match="critic"):
        other.load_weights(tmp_path, overwrite_critic_adapter=True)


def test_the_reference_becomes_the_loaded_policy(tmp_path):
    agent = make_agent()
    agent.learn(batch())
    agent.save_checkpoint(tmp_path)
    other = make_agent(use_separate_reference_adapter=True)
    other.load_checkpoint(tmp_path)
    ids = batch()["input_ids"]
    with torch.no_grad():
        actor = other.actor.eval()(ids).logits
        with other.select_adapter("reference"):
            assert torch.equal(other.actor.eval()(ids).logits, actor)


def test_load_rebuilds_from_the_checkpoint_alone(tmp_path):
    base = tmp_path / "base"
    tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(base)
    TOKENIZER.save_pretrained(base)
    agent = SFT(
        TOKENIZER.eos_token_id, TOKENIZER.eos_token, model_name=str(base), batch_size=8, lr=1e-2, tokenizer=TOKENIZER,
        lora_config=LoraConfig(r=4, target_modules=["q_proj"]), gradient_checkpointing=False,
    )  # fmt: skip
    agent.learn(batch())
    agent.save_checkpoint(tmp_path / "saved")
    loaded = SFT.load(str(tmp_path / "saved"))
    assert loaded.tokenizer is not None
    for one in (agent, loaded):
        one.learn(batch(seed=1))
    assert equal(weights(agent), weights(loaded))
    with pytest.raises(ValueError, match="accelerator"):
        SFT.load(str(tmp_path / "saved"), accelerator=object())


def test_a_snapshot_does_not_change_with_training(tmp_path):
    agent = make_agent()
    agent.learn(batch())
    before = weights(agent)
    snapshot = agent.snapshot_checkpoint()
    agent.learn(batch(seed=1))
    snapshot.write(tmp_path)
    other = make_agent()
    other.load_weights(tmp_path)
    assert equal(weights(other), before)


def test_a_released_snapshot_lends_its_memory_to_the_next(tmp_path):
    agent = make_agent()
    agent.learn(batch())
    first = agent.snapshot_checkpoint()
    lent = {tensor.data_ptr() for tensor in first._borrowed}
    other = agent.snapshot_checkpoint()  # the first is still in use: this one gets memory of its own
    assert not lent & {tensor.data_ptr() for tensor in other._borrowed}
    first.release()
    agent.learn(batch(seed=1))
    after = weights(agent)
    again = agent.snapshot_checkpoint()
    assert {tensor.data_ptr() for tensor in again._borrowed} == lent
    agent.learn(batch(seed=2))
    again.write(tmp_path)
    loaded = make_agent()
    loaded.load_weights(tmp_path)
    assert equal(weights(loaded), after)


# -- clones and populations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False])
def test_a_clone_is_identical_and_independent(lora):
    agent = make_agent(lora=lora, dropout=0.1)
    agent.learn(batch())
    agent.fitness.append(1.0)
    twin = agent.clone(index=9)
    assert (twin.index, twin.fitness, twin.steps, twin.lr) == (9, [1.0], agent.steps, agent.lr)
    assert equal(weights(agent), weights(twin))
    assert equal(moments(agent), moments(twin))
    assert [b.dtype for b in agent.actor.buffers()] == [b.dtype for b in twin.actor.buffers()]
    kept_weights, kept_moments = weights(twin), moments(twin)
    agent.learn(batch(seed=1))
    agent.fitness.append(2.0)
    assert equal(kept_weights, weights(twin))
    assert equal(kept_moments, moments(twin))
    assert twin.fitness == [1.0]
    twin.learn(batch(seed=1))
    assert equal(weights(agent), weights(twin))
    assert agent.clone().index == agent.index


def test_a_full_fine_tune_says_that_its_clone_is_a_copy(caplog, monkeypatch):
    monkeypatch.setattr("agilerl.algorithms.core.llm._told", set())
    make_agent().clone()
    assert not caplog.text
    make_agent(lora=False).clone()
    assert "copies the whole network" in caplog.text


def test_clones_share_the_frozen_base_and_own_the_rest():
    agent = make_agent()
    twins = SFT.population(
        3, pad_token_id=TOKENIZER.eos_token_id, pad_token=TOKENIZER.eos_token,
        lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
        actor_network=tiny_model("llama", vocab_size=len(TOKENIZER)),
    )  # fmt: skip
    assert [one.index for one in twins] == [0, 1, 2]
    for pair in ((agent, agent.clone()), (twins[0], twins[2])):
        first, second = (dict(one.actor.named_parameters()) for one in pair)
        for name in first:
            shared = first[name].data_ptr() == second[name].data_ptr()
            assert shared != first[name].requires_grad, name


def test_a_bfloat16_clone_gives_the_same_bits_at_length_1024():
    model = tiny_model("llama", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, max_position_embeddings=1024)
    agent = SFT(
        TOKENIZER.eos_token_id, TOKENIZER.eos_token, actor_network=model, lora_config=LoraConfig(r=4, target_modules=["q_proj"]),
        gradient_checkpointing=False, lr=1e-2,
    )  # fmt: skip
    agent.learn(batch())
    twin = agent.clone()
    ids = torch.randint(0, len(TOKENIZER), (1, 1024), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        left, right = (one.actor.eval()(ids).logits for one in (agent, twin))
    assert left.dtype == torch.bfloat16
    assert torch.equal(left, right)


def test_cleaning_up_one_leaves_the_others():
    agent = make_agent()
    twin = agent.clone()
    other = make_agent()
    agent.clean_up()
    for one in (twin, other):
        one.learn(batch())
    assert equal(weights(twin), weights(other))


def test_population_resumes_each_member(tmp_path):
    kwargs = {
        "pad_token_id": TOKENIZER.eos_token_id, "pad_token": TOKENIZER.eos_token, "lr": 1e-2,
        "lora_config": LoraConfig(r=2, target_modules=["q_proj"]), "gradient_checkpointing": False,
    }  # fmt: skip
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    agent = SFT(**kwargs, actor_network=copy.deepcopy(model))
    agent.learn(batch())
    agent.save_checkpoint(tmp_path)
    pop = SFT.population(2, resume_from_checkpoint=str(tmp_path), actor_network=model, **kwargs)
    assert [one.index for one in pop] == [0, 1]
    for one in pop:
        assert equal(weights(one), weights(agent))
        assert equal(moments(one), moments(agent))
    with pytest.raises(ValueError, match="size"):
        SFT.population(0, actor_network=model, **kwargs)


def test_a_method_put_on_an_agent_is_the_one_that_is_called():
    agent = make_agent()
    agent.learn = lambda batch: {"loss": 7.0}
    assert agent.learn(None) == {"loss": 7.0}
    del agent.learn
    assert agent.learn.__func__ is type(agent).learn
