"""Micro-batches side by side: the same result as one after the other, and the same bytes each time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from agilerl import lanes
from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from agilerl.models.packing import Packer
from tests.algorithms.test_exactness import assert_close, gradients_of_learn
from tests.helpers import tiny_model

LENGTHS = [14, 9, 12, 5, 13, 8, 11, 10]
WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_agent(
    family: str = "llama", cls: type = SFT, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **settings
) -> SFT:
    sizes = {"n_embd": 256} if family == "gpt2" else WIDE
    model = tiny_model(family, dtype=dtype, spread=0.05, **{**sizes, **settings.pop("model", {})})
    targets = ["c_attn"] if family == "gpt2" else "all-linear"
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, fan_in_fan_out=family == "gpt2")
    given = {"lr": 1e-2, "batch_size": 8, "micro_batch_size_per_gpu": 4, "lora_config": config} | settings
    agent = cls(0, "<pad>", actor_network=model, **given)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in agent.actor.parameters():
            if dtype == torch.float64:
                p.data = p.data.double()
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.05)
    return agent


def in_turn(agent: SFT) -> SFT:
    """The same agent, computing one micro-batch after the other."""
    agent._resources.packer = replace(agent._resources.packer, num_lanes=1)
    agent._adopt(agent._resources)
    return agent


def make_batch(lengths: list[int] = LENGTHS, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(lengths):
        ids[i, :length], mask[i, :length] = torch.randint(3, 128, (length,), generator=generator), 1
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [3] * len(lengths)}


def make_pairs() -> dict:
    chosen, rejected = make_batch(seed=1), make_batch(LENGTHS[::-1], seed=2)
    rejected["input_ids"][:, :3] = chosen["input_ids"][:, :3]
    return {"prompt_lengths": [3] * len(LENGTHS)} | {
        f"{name}_{key}": batch[key]
        for name, batch in (("chosen", chosen), ("rejected", rejected))
        for key in ("input_ids", "attention_mask")
    }


def adapter_bytes(agent: SFT) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in agent.actor.parameters() if p.requires_grad)


def count_lanes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    real = lanes.run
    monkeypatch.setattr(lanes, "run", lambda tasks, **more: counted.append(len(tasks)) or real(tasks, **more))
    return counted


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "phi3", "mistral", "olmo2", "granite"])
def test_loss_and_gradients_are_those_of_one_micro_batch_after_the_other(
    family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = count_lanes(monkeypatch)
    made = [make_agent(family, dtype=torch.float64, gradient_checkpointing=checkpointing) for _ in range(2)]
    assert [agent._resources.packer.num_lanes for agent in made] == [2, 2]
    counted.clear()
    found, gradients = gradients_of_learn(made[0], make_batch())
    assert counted == [2]
    wanted, expected = gradients_of_learn(in_turn(made[1]), make_batch())
    assert counted == [2]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-8)
    assert_close(gradients, expected, 1e-8 if family in ("qwen3", "olmo2") else 1e-10)
    quiet = [agent.learn(make_batch(seed=3), training=False)["loss"] for agent in made]
    assert counted == [2, 2]
    assert quiet[0] == pytest.approx(quiet[1], rel=1e-6)


def test_preference_training_starts_at_ln_2_and_has_the_same_gradients() -> None:
    made = [make_agent(cls=DPO, dtype=torch.float64, nll_alpha=0.0) for _ in range(2)]
    for agent in made:  # the reference is the policy that training starts from
        agent._resources.adapters.copy("actor", "reference")
    found, gradients = gradients_of_learn(made[0], make_pairs())
    wanted, expected = gradients_of_learn(in_turn(made[1]), make_pairs())
    assert found["loss"] == pytest.approx(0.6931471805599453, abs=1e-12)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
    assert_close(gradients, expected, 1e-10)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_same_bytes_each_time_with_dropout(checkpointing: bool) -> None:
    def run(noise: int) -> bytes:
        torch.manual_seed(noise)
        agent = make_agent(dropout=0.1, gradient_checkpointing=checkpointing)
        for step in range(6):
            agent.learn(make_batch(seed=step))
        return adapter_bytes(agent)

    assert run(1) == run(2)


def test_a_recomputed_block_drops_what_the_first_pass_dropped() -> None:
    made = [make_agent(dropout=0.15, dtype=torch.float64, gradient_checkpointing=on) for on in (False, True)]
    found, wanted = (gradients_of_learn(agent, make_batch())[1] for agent in made)
    assert_close(found, wanted, 1e-12)


def test_lanes_draw_apart_from_each_other() -> None:
    drawn = lanes.run([lambda: torch.rand(4, generator=lanes.generator())] * 2, seed=3)
    again = lanes.run([lambda: torch.rand(4, generator=lanes.generator())] * 2, seed=3)
    assert not torch.equal(*drawn)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_resume_is_exact(tmp_path) -> None:
    agent = make_agent(dropout=0.1)
    agent.learn(make_batch(seed=0))
    agent.save_checkpoint(str(tmp_path / "c"), lora_only=False)
    other = make_agent(dropout=0.1)
    other.load_checkpoint(str(tmp_path / "c"), load_optimizer=True)
    for each in (agent, other):
        each.learn(make_batch(seed=1))
    assert adapter_bytes(agent) == adapter_bytes(other)


@pytest.mark.parametrize(
    ("family", "model"),
    [("llama", {"attention_dropout": 0.1}), ("gpt2", {"resid_pdrop": 0.1}), ("llama", {"hidden_size": 64})],
)
def test_models_that_draw_otherwise_or_are_narrow_have_one_lane(family: str, model: dict) -> None:
    given = {"attn_pdrop": 0.0, "embd_pdrop": 0.0} | model if family == "gpt2" else model
    before = torch.get_rng_state()
    agent = make_agent(family, model=given)
    assert agent._resources.packer.num_lanes == 1
    assert torch.equal(before, torch.get_rng_state())


def test_what_a_user_hangs_on_the_model_sees_one_micro_batch_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent()
    counted = count_lanes(monkeypatch)
    agent.actor.get_base_model().model.norm.register_forward_hook(lambda *_: None)
    agent.learn(make_batch())
    assert counted == []


def test_autocast_reaches_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent()
    counted = count_lanes(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        agent.learn(make_batch(), training=False)
    assert counted == []


def test_a_forked_process_has_lanes_of_its_own() -> None:
    lanes.run([lambda: None] * 2)
    child = os.fork()
    if child == 0:
        os._exit(0 if lanes.run([lambda: 1, lambda: 2]) == [1, 2] else 1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked process waits for threads that it does not have")
    assert status == 0


def test_an_error_in_a_lane_is_the_callers_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent()
    before = adapter_bytes(agent)
    objective = type(agent._updater.objective)
    real, broken = objective.loss, ["second"]

    def loss(self, model, micro, units):
        result = real(self, model, micro, units)
        if broken and int(micro.inputs["input_ids"][0, 0]) == first:
            raise RuntimeError("no more memory")
        return result

    first = int(make_batch()["input_ids"][0, 0])
    monkeypatch.setattr(objective, "loss", loss)
    with pytest.raises(RuntimeError, match="no more memory"):
        agent.learn(make_batch())
    assert adapter_bytes(agent) == before
    assert torch.get_num_threads() == 2
    assert agent.actor.config._attn_implementation == "sdpa"
    broken.clear()
    other = make_agent()
    other._state.learn_calls = agent._state.learn_calls
    assert agent.learn(make_batch())["loss"] == pytest.approx(other.learn(make_batch())["loss"], rel=1e-12)


@pytest.mark.parametrize("max_rows", [2, 4, 5, 8, None])
def test_every_row_is_in_one_lane_and_lanes_are_even(max_rows: int | None) -> None:
    packer = Packer("packed", "", token_budget=64, num_lanes=2)
    planned = packer.plan_lanes(LENGTHS, max_rows)
    assert planned is not None
    micros, shares = planned
    assert sorted(row for rows in micros for row in rows) == list(range(len(LENGTHS)))
    assert sorted(number for numbers in shares for number in numbers) == list(range(len(micros)))
    assert all(len(rows) <= (max_rows or 99) // 2 for rows in micros)
    loads = [sum(LENGTHS[row] for number in numbers for row in micros[number]) for numbers in shares]
    assert max(loads) <= 0.55 * sum(LENGTHS)
    if max_rows is None:
        assert all(sum(LENGTHS[row] for row in rows) <= 32 for rows in micros)


@pytest.mark.parametrize(
    ("lengths", "max_rows"), [([9], 4), ([9, 9], 1), ([40, 2, 2], 4), ([40, 30], None), ([30, 20, 30], 2)]
)
def test_rows_that_cannot_be_halved_take_turns(lengths: list[int], max_rows: int | None) -> None:
    assert Packer("packed", "", token_budget=64, num_lanes=2).plan_lanes(lengths, max_rows) is None


def test_one_lane_plans_nothing() -> None:
    assert Packer("packed", "", token_budget=64).plan_lanes(LENGTHS, 4) is None
