"""DPO against a plain float64 implementation: full logits, each answer alone, no padding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn

from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from tests.algorithms.test_exactness import assert_close, gradients_of_learn
from tests.helpers import tiny_model

PROMPTS = (4, 1, 6, 3, 2)
CHOSEN = (5, 3, 2, 7, 1)
REJECTED = (3, 6, 2, 1, 4)


def make_pairs(side: str = "right") -> dict:
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in PROMPTS]
    batch: dict = {"prompt_lengths": list(PROMPTS)}
    for name, sizes in (("chosen", CHOSEN), ("rejected", REJECTED)):
        rows = [
            torch.cat([p, torch.randint(3, 128, (n,), generator=generator)])
            for p, n in zip(prompts, sizes, strict=True)
        ]
        width = max(len(r) for r in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            columns = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, columns], mask[i, columns] = row, 1
        batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": mask}
    return batch


def perturbed(agent: DPO | SFT, seed: int = 7) -> None:
    """Move the actor away from where it started."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in agent.actor.named_parameters():
            if p.requires_grad and "lora_" in name:
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.2)


def make_agent(family: str = "llama", dtype: torch.dtype = torch.float64, **settings) -> DPO:
    model = tiny_model(family, dtype=dtype)
    config = settings.pop("lora_config", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    agent = DPO(
        0, "<pad>", actor_network=model, lora_config=config, **{"batch_size": 8, "max_grad_norm": None} | settings
    )
    if dtype == torch.float64:
        for p in agent.actor.parameters():
            p.data = p.data.double()
        if agent.optimizer is not None:
            agent.reinit_optimizers()
    return agent


def logprobs(model: nn.Module, batch: dict, side: str) -> tuple[Tensor, Tensor]:
    sums, lengths = [], []
    for row, prompt in enumerate(batch["prompt_lengths"]):
        ids = batch[f"{side}_input_ids"][row][batch[f"{side}_attention_mask"][row] == 1]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
        sums.append(-F.cross_entropy(logits[prompt - 1 : -1], ids[prompt:], reduction="sum"))
        lengths.append(len(ids) - prompt)
    return torch.stack(sums), torch.tensor(lengths, dtype=torch.float64)


def plain_loss(
    policy: nn.Module, reference: nn.Module, batch: dict, kind: str, beta: float, alpha: float, smooth: float
) -> Tensor:
    (pc, nc), (pr, nr) = logprobs(policy, batch, "chosen"), logprobs(policy, batch, "rejected")
    with torch.no_grad():
        (rc, _), (rr, _) = logprobs(reference, batch, "chosen"), logprobs(reference, batch, "rejected")
    d = (pc - rc) - (pr - rr)
    if kind == "sigmoid":
        loss = -(1 - smooth) * torch.log(torch.sigmoid(beta * d)) - smooth * torch.log(torch.sigmoid(-beta * d))
    elif kind == "ipo":
        loss = (d - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        loss = torch.clamp(1 - beta * d, min=0)
    elif kind == "sigmoid_norm":
        loss = -torch.log(torch.sigmoid(beta * ((pc - rc) / nc - (pr - rr) / nr)))
    else:
        loss = -torch.log(torch.sigmoid(beta * (pc / nc - pr / nr) - 0.5))
    return loss.mean() + alpha * -pc.sum() / nc.sum()


@pytest.mark.parametrize("kind", ["sigmoid", "smoothed", "ipo", "hinge", "sigmoid_norm", "simpo"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_and_gradients_equal_a_plain_implementation(kind: str, side: str) -> None:
    smooth, name = (0.2, "sigmoid") if kind == "smoothed" else (0.0, kind)
    batch = make_pairs(side)
    for micro, share in ((1, True), (2, True), (5, False), (None, True), (3, False)):
        agent = make_agent(
            "phi",  # no float32 steps of its own
            beta=0.3,
            nll_alpha=0.7,
            loss_type=name,
            label_smoothing=smooth,
            share_prompt=share,
            micro_batch_size_per_gpu=micro,
        )
        reference = copy.deepcopy(agent.actor)
        perturbed(agent)
        loss = plain_loss(agent.actor, reference, batch, name, 0.3, 0.7, smooth)
        parameters = {n: p for n, p in agent.actor.named_parameters() if p.requires_grad}
        grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        assert any(g.abs().max() > 1e-4 for g in grads.values())
        metrics, found = gradients_of_learn(agent, batch)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)
        assert_close(found, grads, 1e-10)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "falcon", "qwen3_moe"])
def test_sharing_the_prompt_changes_nothing(family: str) -> None:
    batch = make_pairs()
    targets = ["query_key_value"] if family == "falcon" else ["q_proj", "v_proj"]
    results = []
    for share in (True, False):
        agent = make_agent(family, share_prompt=share, lora_config=LoraConfig(r=4, target_modules=targets))
        if family == "qwen3_moe":
            agent.actor.get_base_model().set_experts_implementation("eager")
        perturbed(agent)
        results.append(gradients_of_learn(agent, batch))
    # These families' norms compute in float32 inside, so that the order of two gradients' sum shows in the last places.
    tolerance = 1e-10 if family == "falcon" else 1e-6
    assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], rel=tolerance)
    assert_close(results[0][1], results[1][1], tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_first_step_after_sft_is_ln_2(tmp_path, dropout: float, epochs: int) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    sft = SFT(0, "<pad>", actor_network=tiny_model("llama"), lora_config=config, lr=1e-2)
    ids = torch.randint(3, 128, (6, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(epochs):
        sft.learn({"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [3] * 6})
    sft.save_checkpoint(tmp_path)
    agent = DPO(0, "<pad>", actor_network=tiny_model("llama"), lora_config=config)
    agent.load_checkpoint(tmp_path)
    assert agent.lr == 5e-6
    weights = agent._resources.adapters
    trained = sft._resources.adapters.read("actor")
    for role in ("actor", "reference"):
        assert all(torch.equal(tensor, trained[name]) for name, tensor in weights.read(role).items())
    metrics = agent.learn(make_pairs())
    assert metrics["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["loss"] == pytest.approx(math.log(2) + metrics["nll"], abs=1e-6)
    assert metrics["reward_margin"] == 0.0
    assert metrics["chosen_reward"] == metrics["rejected_reward"] == 0.0


def test_metrics_do_not_depend_on_the_micro_batch() -> None:
    found = []
    for micro in (1, 2, 5):
        agent = make_agent(micro_batch_size_per_gpu=micro)
        agent.learn(make_pairs(), training=False)
        perturbed(agent)
        found.append({k: v for k, v in agent.learn(make_pairs()).items() if not k.startswith("learn_phase")})
    for other in found[1:]:
        for name, value in found[0].items():
            assert other[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert 0.0 <= found[0]["accuracy"] <= 1.0
    assert found[0]["reward_margin"] == pytest.approx(found[0]["chosen_reward"] - found[0]["rejected_reward"])


def test_identical_answers_have_loss_ln_2_and_no_preference_gradient() -> None:
    batch = make_pairs()
    for name in ("input_ids", "attention_mask"):
        batch[f"rejected_{name}"] = batch[f"chosen_{name}"].clone()
    agent = make_agent(nll_alpha=0.0)
    perturbed(agent)
    metrics, grads = gradients_of_learn(agent, batch)
    assert metrics["preference_loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["reward_margin"] == pytest.approx(0.0, abs=1e-12)
    assert all(g.abs().max() < 1e-12 for g in grads.values())


def test_training_prefers_the_chosen_answer_and_leaves_the_reference_alone() -> None:
    agent = make_agent(dtype=torch.float32, lr=1e-2, max_grad_norm=1.0)
    before = {n: t.clone() for n, t in agent._resources.adapters.read("reference").items()}
    for _ in range(15):
        metrics = agent.learn(make_pairs())
    assert metrics["accuracy"] == 1.0
    assert metrics["reward_margin"] > 0.5
    assert all(torch.equal(t, before[n]) for n, t in agent._resources.adapters.read("reference").items())


def test_the_reference_is_computed_once_and_refreshed_only_when_asked() -> None:
    agent = make_agent()
    agent.learn(make_pairs())
    values = dict(agent._reference.values)
    assert len(values) == 5
    perturbed(agent)
    agent.learn(make_pairs())
    assert agent._reference.values == values
    agent.set_reference_policy(1)
    assert agent.learn(make_pairs())["reward_margin"] == 0.0
    agent.set_reference_policy(1)
    assert agent.learn(make_pairs())["reward_margin"] != 0.0


def test_without_a_reference_adapter_the_base_is_the_reference() -> None:
    agent = make_agent(use_separate_reference_adapter=False)
    perturbed(agent)
    base = copy.deepcopy(agent.actor).unload()
    loss = plain_loss(agent.actor, base, make_pairs(), "sigmoid", 0.1, 1.0, 0.0)
    assert agent.learn(make_pairs(), training=False)["loss"] == pytest.approx(loss.item(), rel=1e-10)


def test_full_fine_tuning_keeps_a_frozen_reference_across_a_checkpoint(tmp_path) -> None:
    def agent() -> DPO:
        return DPO(0, "<pad>", actor_network=tiny_model("llama"), use_separate_reference_adapter=False, lr=1e-3)

    first, second = agent(), agent()
    for _ in range(2):
        first.learn(make_pairs())
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path, load_optimizer=True)
    again = make_pairs()
    again["chosen_input_ids"] = again["chosen_input_ids"].clone()
    again["chosen_input_ids"][0, 5] = 99  # a pair that the first agent has not seen
    assert second.learn(again) | {"t": 0} == pytest.approx(first.learn(again) | {"t": 0}, rel=1e-6, abs=10.0)
    assert torch.equal(second.actor.lm_head.weight, first.actor.lm_head.weight)


def test_resume_is_exact(tmp_path) -> None:
    straight, first = make_agent(dtype=torch.float32, lr=1e-2), make_agent(dtype=torch.float32, lr=1e-2)
    for agent in (straight, first):
        agent.learn(make_pairs())
    first.save_checkpoint(tmp_path)
    resumed = make_agent(dtype=torch.float32, lr=1e-2)
    resumed.load_checkpoint(tmp_path, load_optimizer=True)
    for agent in (straight, resumed):
        agent.learn(make_pairs())
    mine, theirs = resumed._resources.adapters.read("actor"), straight._resources.adapters.read("actor")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_clones_are_bit_identical_and_independent() -> None:
    agent = make_agent(lr=1e-2)
    agent.learn(make_pairs())
    twin = agent.clone(index=4)
    assert twin.learn(make_pairs(), training=False) == agent.learn(make_pairs(), training=False)
    before = agent.learn(make_pairs(), training=False)["loss"]
    twin.learn(make_pairs())
    assert agent.learn(make_pairs(), training=False)["loss"] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must be a finite number above 0"),
        ({"nll_alpha": -1.0}, "nll_alpha must be a finite number of?.*at least 0|nll_alpha must be a finite number"),
        ({"loss_type": "kto"}, "loss_type must be one of"),
        ({"label_smoothing": 0.6}, "label_smoothing must be below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing belongs to the sigmoid losses"),
        ({"lora_config": None}, "use_separate_reference_adapter needs a lora_config"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_agent(**settings)


def test_beta_can_be_assigned_and_takes_effect() -> None:
    agent = make_agent(dtype=torch.float32)
    agent.learn(make_pairs())
    perturbed(agent)
    first = agent.learn(make_pairs(), training=False)
    agent.beta = 0.2
    second = agent.learn(make_pairs(), training=False)
    assert second["reward_margin"] == pytest.approx(2 * first["reward_margin"], rel=1e-5)


def test_the_adapter_that_a_model_brings_is_the_reference() -> None:
    sft = SFT(
        0, "<pad>", actor_network=tiny_model("llama"), lora_config=LoraConfig(r=4, target_modules=["q_proj"]), lr=1e-2
    )
    ids = torch.randint(3, 128, (6, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [3] * 6}
    for _ in range(5):
        sft.learn(batch)
    trained = sft._resources.adapters.read("actor")
    trained = {name: tensor.clone() for name, tensor in trained.items()}
    agent = DPO(0, "<pad>", actor_network=sft.actor)
    metrics = agent.learn(make_pairs(), training=False)
    assert metrics["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["reward_margin"] == 0.0
    for role in ("actor", "reference"):
        assert all(torch.equal(t, trained[n]) for n, t in agent._resources.adapters.read(role).items())


def test_one_identical_pair_among_three_adds_ln_2_and_no_gradient() -> None:
    batch = {name: value[:3] for name, value in make_pairs().items()}
    for name in ("input_ids", "attention_mask"):  # the middle one; its row is as wide as the widest, padding aside
        same = torch.zeros_like(batch[f"rejected_{name}"])
        width = min(same.shape[1], batch[f"chosen_{name}"].shape[1])
        same[1, :width] = batch[f"chosen_{name}"][1, :width]
        batch[f"rejected_{name}"] = torch.where(torch.arange(3)[:, None] == 1, same, batch[f"rejected_{name}"])
    others = {name: value[::2] for name, value in batch.items()}
    found = []
    for rows in (batch, others):
        agent = make_agent("phi", nll_alpha=0.0)
        agent.learn(rows, training=False)
        perturbed(agent)
        found.append(gradients_of_learn(agent, rows))
    (with_it, three), (without, two) = found
    assert 3 * with_it["preference_loss"] == pytest.approx(2 * without["preference_loss"] + math.log(2), rel=1e-12)
    assert_close({name: 1.5 * g for name, g in three.items()}, two, 1e-10)
