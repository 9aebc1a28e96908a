"""What a training call does besides its gradients: steps, metrics, randomness, refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.algorithms.sft import SFT
from agilerl.optim import CosineLRScheduleConfig
from tests.helpers import tiny_model


def make_agent(dropout: float = 0.0, **settings) -> SFT:
    config = settings.pop("lora_config", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout))
    network = settings.pop("actor_network", None) or tiny_model("llama")
    return SFT(
        **{"pad_token_id": 0, "pad_token": "<pad>", "lr": 1e-2, "lora_config": config} | settings, actor_network=network
    )


def make_batch(rows: int = 6, length: int = 10, seed: int = 0) -> dict:
    ids = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [3] * rows}


def adapter_bytes(agent: SFT) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in agent.actor.parameters() if p.requires_grad)


def count_steps(agent: SFT) -> list[int]:
    steps: list[int] = []
    agent.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


@pytest.mark.parametrize(
    ("rows", "mini", "epochs", "wanted"), [(6, None, 1, 1), (6, 4, 1, 2), (6, 4, 3, 6), (1, 8, 1, 1)]
)
def test_optimizer_steps_per_call(rows: int, mini: int | None, epochs: int, wanted: int) -> None:
    agent = make_agent(batch_size=8, mini_batch_size=mini, update_epochs=epochs)
    steps = count_steps(agent)
    agent.learn(make_batch(rows))
    assert len(steps) == wanted


def test_same_seed_same_bytes_with_dropout_whatever_the_global_generator_does() -> None:
    def run(noise: int) -> bytes:
        torch.manual_seed(noise)
        agent = make_agent(dropout=0.3, micro_batch_size_per_gpu=2)
        for step in range(10):
            torch.rand(noise)
            agent.learn(make_batch(seed=step))
        return adapter_bytes(agent)

    first = run(1)
    assert first == run(2)
    other = make_agent(dropout=0.3, micro_batch_size_per_gpu=2, seed=7)
    assert adapter_bytes(other) != adapter_bytes(make_agent(dropout=0.3, micro_batch_size_per_gpu=2))


def test_learning_leaves_the_global_generator_alone() -> None:
    agent = make_agent(dropout=0.3)
    before = torch.get_rng_state()
    agent.learn(make_batch())
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_is_on_when_training_and_off_when_not() -> None:
    agent = make_agent(dropout=0.5, lr=1e-1)
    agent.learn(make_batch())
    batch = make_batch(seed=1)
    quiet = [agent.learn(batch, training=False)["loss"] for _ in range(2)]
    assert quiet[0] == quiet[1]
    agent.actor.eval()
    noisy = agent.learn(batch)["loss"]
    assert noisy != pytest.approx(quiet[0], rel=1e-6)
    assert not agent.actor.training


def test_overfitting_continues_the_sequence_exactly() -> None:
    agent = SFT(0, "<pad>", actor_network=tiny_model("llama", spread=None), lr=1e-2, max_grad_norm=1.0)
    ids = torch.tensor([[5, 6, 7, 8, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [1]}
    for _ in range(60):
        metrics = agent.learn(batch)
    assert metrics["loss"] < 0.01
    with torch.no_grad():
        out = agent.actor.generate(input_ids=ids[:, :1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out[0].tolist() == [5, 6, 7, 8, 2]


def test_metrics_are_complete_and_consistent() -> None:
    metrics = make_agent().learn(make_batch())
    phases = ("prepare", "forward", "backward", "grad_sync", "optim", "other")
    assert {f"learn_phase_{p}_s" for p in phases} <= metrics.keys()
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["tokens"] == 6 * 7
    assert metrics["real_tokens"] == 60
    assert metrics["padding_share"] == 0.0


def test_non_finite_loss_changes_no_weight() -> None:
    agent = make_agent()
    agent.learn(make_batch())
    with torch.no_grad():
        next(p for n, p in agent.actor.named_parameters() if "layers.1" in n and "up_proj" in n)[0, 0] = math.nan
    before = adapter_bytes(agent)
    with pytest.raises(ValueError, match=r"Non-finite training step.*No weight was changed"):
        agent.learn(make_batch())
    assert adapter_bytes(agent) == before


def test_batches_without_targets_are_refused() -> None:
    agent = make_agent()
    with pytest.raises(ValueError, match="every weight is zero"):
        agent.learn({**make_batch(), "prompt_lengths": [10] * 6})
    with pytest.raises(ValueError, match="without rows"):
        agent.learn(
            {"input_ids": torch.zeros(0, 4).long(), "attention_mask": torch.zeros(0, 4).long(), "prompt_lengths": []}
        )


def test_learning_rate_assignment_and_schedule_take_effect_at_once() -> None:
    schedule = CosineLRScheduleConfig(10, warmup_proportion=0.2)
    agent = make_agent(cosine_lr_schedule_config=schedule)
    seen = []
    agent.optimizer.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    for _ in range(3):
        agent.learn(make_batch())
    agent.lr = 2e-2
    assert agent.current_lr == pytest.approx(2e-2 * 0.966, rel=1e-3)
    agent.learn(make_batch())
    assert seen == pytest.approx([0.5e-2, 1e-2, 1e-2, 2e-2 * 0.966], rel=1e-3)
    assert agent.lr_schedule_step == 4
    assert agent.current_lr_critic == agent.current_lr


def test_one_step_schedule_trains() -> None:
    agent = make_agent(cosine_lr_schedule_config=CosineLRScheduleConfig(1, warmup_proportion=1.0))
    before = adapter_bytes(agent)
    agent.learn(make_batch())
    assert adapter_bytes(agent) != before


def test_the_callers_objects_stay_as_they_were() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    before = copy.deepcopy(config.to_dict())
    make_agent(lora_config=config)
    assert config.to_dict() == before


def test_a_given_adapter_becomes_the_actor_and_trains() -> None:
    network = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    for p in network.parameters():
        p.requires_grad_(False)  # as an adapter looks after from_pretrained
    agent = make_agent(actor_network=network, lora_config=None)
    assert list(agent.actor.peft_config) == ["actor"]
    before = adapter_bytes(agent)
    assert before
    agent.learn(make_batch())
    assert adapter_bytes(agent) != before


def test_lora_plus_gives_the_b_factors_their_own_rate() -> None:
    agent = make_agent(lora_plus_ratio=16.0)
    rates = {g["lr_ratio"]: g["lr"] for g in agent.optimizer.param_groups}
    assert rates == {1.0: 1e-2, 16.0: pytest.approx(0.16)}
    names = {id(p): n for n, p in agent.actor.named_parameters()}
    fast = next(g for g in agent.optimizer.param_groups if g["lr_ratio"] == 16.0)
    assert all("lora_B" in names[id(p)] for p in fast["params"])


def test_bfloat16_full_fine_tuning_does_not_round_small_updates_away() -> None:
    agent = SFT(0, "<pad>", actor_network=tiny_model("llama", dtype=torch.bfloat16), lr=1e-5, max_grad_norm=None)
    weight = agent.actor.get_input_embeddings().weight
    before = weight.detach().clone()
    batch = make_batch()
    for _ in range(3):
        agent.learn(batch)
    moved_after_3 = (weight != before).float().mean().item()
    for _ in range(60):
        agent.learn(batch)
    moved_after_63 = (weight != before).float().mean().item()
    assert moved_after_63 > 10 * moved_after_3  # updates add up although each is below the last place
    state = agent.optimizer.optimizer.state[weight]
    assert state["master"].dtype == state["exp_avg"].dtype == torch.float32


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"lr must be.*update_epochs must be.*batch_size must be"):
        SFT(0, "<pad>", model_name="x", lr=-1.0, update_epochs=0, batch_size=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": math.nan}, "lr must be a finite number above 0, found nan"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be a finite number above 0"),
        ({"chunk_rows": 0}, "chunk_rows must be a whole number of at least 1, found 0"),
        ({"pad_token_id": -1}, "pad_token_id must be a token id, found -1"),
        ({"model_config": {"dtype": "float32"}}, "model_config goes with model_name"),
        ({"lora_config": None, "use_separate_reference_adapter": True}, "needs a lora_config"),
        ({"hp_config": HyperparameterConfig(seed=RLParameter(0, 1))}, "cannot mutate"),
        ({"cosine_lr_schedule_config": CosineLRScheduleConfig(5, actor_start_step=2)}, "actor_start_step must be 0"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_agent(**settings)


def test_neither_network_nor_name() -> None:
    with pytest.raises(ValueError, match="actor_network"):
        SFT(0, "<pad>")


def test_unwrapped_agents_say_so_and_keep_their_moments() -> None:
    agent = make_agent(wrap=False)
    assert agent.optimizer is None
    with pytest.raises(ValueError, match="wrap_models"):
        agent.learn(make_batch())
    agent.wrap_models()
    twin = agent.clone()
    for _ in range(2):
        agent.learn(make_batch())
        twin.learn(make_batch())
    agent.unwrap_models()
    assert agent.optimizer is None
    agent.wrap_models()
    assert agent.learn(make_batch())["loss"] == twin.learn(make_batch())["loss"]
    assert adapter_bytes(agent) == adapter_bytes(twin)


def test_the_actor_stays_an_ordinary_model() -> None:
    agent = make_agent()
    agent.learn(make_batch())
    batch = make_batch()
    mask = batch["attention_mask"].clone()
    mask[0, 6:] = 0
    padded = agent.actor(input_ids=batch["input_ids"], attention_mask=mask).logits[0, :6]
    alone = agent.actor(input_ids=batch["input_ids"][:1, :6]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-5)
    assert agent.actor(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.isfinite()
