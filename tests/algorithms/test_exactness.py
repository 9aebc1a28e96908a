"""The loss and every gradient are those of float64 cross-entropy on the model's own logits, each row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn

from agilerl.algorithms.sft import SFT
from tests.helpers import tiny_model

FAMILIES = {
    "llama": ["q_proj", "v_proj"],
    "qwen2": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "down_proj"],
    "gemma2": ["q_proj", "v_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "cohere": ["q_proj", "up_proj"],
    "granite": ["q_proj", "v_proj"],
}
# Gemma-2's own attention and norms compute in float32, whatever the model's type is.
TOLERANCE = {"gemma2": 1e-8}
LENGTHS = (11, 3, 9, 2, 7, 16, 5, 12)
PROMPTS = (4, 1, 8, 1, 2, 5, 4, 11)


def make_batch(side: str = "right") -> dict[str, Tensor | list[int]]:
    """Eight rows of very different length, padded on one side."""
    generator = torch.Generator().manual_seed(3)
    width = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        columns = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, columns] = torch.randint(3, 128, (length,), generator=generator)
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": list(PROMPTS)}


def reference(model: nn.Module, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """Each row alone, without padding, through the model's own logits, in float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, prompt in enumerate(batch["prompt_lengths"]):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
        first = max(prompt, 1)
        total = total + F.cross_entropy(logits[first - 1 : -1], ids[first:], reduction="sum")
        count += len(ids) - first
    loss = total / count
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.item(), dict(zip(parameters, grads, strict=True))


def make_agent(family: str, *, lora: bool = True, **settings) -> SFT:
    model = tiny_model(family, dtype=torch.float64)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=FAMILIES[family]) if lora else None
    agent = SFT(0, "<pad>", actor_network=model, lora_config=config, max_grad_norm=None, **settings)
    with torch.no_grad():  # an untouched B factor would make every gradient of A zero
        generator = torch.Generator().manual_seed(7)
        for name, p in agent.actor.named_parameters():
            if "lora_" in name:
                p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
    agent.reinit_optimizers()
    return agent


def gradients_of_learn(agent: SFT, batch: dict) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of one call, and the gradients that the optimizer saw."""
    seen: dict[str, Tensor] = {}

    def record(*_: object) -> None:
        seen.update({n: p.grad.clone() for n, p in agent.actor.named_parameters() if p.requires_grad})

    handle = agent.optimizer.optimizer.register_step_pre_hook(record)
    metrics = agent.learn(batch)
    handle.remove()
    return metrics, seen


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert torch.isfinite(found[name]).all(), name
        expected = torch.zeros_like(found[name]) if grad is None else grad
        scale = max(1.0, expected.abs().max().item())
        assert (found[name] - expected).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_and_gradients_equal_float64_cross_entropy(family: str, side: str) -> None:
    batch = make_batch(side)
    tolerance = TOLERANCE.get(family, 1e-10)
    for micro in (1, 2, 4, 8, None):
        agent = make_agent(family, micro_batch_size_per_gpu=micro, batch_size=8)
        loss, grads = reference(agent.actor, batch)
        assert any(g is not None and g.abs().max() > 1e-4 for g in grads.values())
        metrics, found = gradients_of_learn(agent, batch)
        assert metrics["loss"] == pytest.approx(loss, rel=tolerance, abs=tolerance)
        assert metrics["tokens"] == sum(LENGTHS) - sum(PROMPTS)
        assert_close(found, grads, tolerance)


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-10), ("gpt2", 1e-10), ("cohere", 1e-8)])
def test_full_fine_tuning_trains_every_weight_by_its_exact_gradient(family: str, tolerance: float) -> None:
    # Cohere's layer norm computes in float32 inside, and so does the gradient of its weight.
    batch = make_batch()
    agent = make_agent(family, lora=False, micro_batch_size_per_gpu=3, batch_size=8)
    loss, grads = reference(agent.actor, batch)
    metrics, found = gradients_of_learn(agent, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-10)
    assert_close(found, grads, tolerance)
    norm = torch.cat([g.flatten() for g in grads.values() if g is not None]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=tolerance)


def test_gradient_checkpointing_changes_nothing() -> None:
    batch = make_batch()
    results = [
        gradients_of_learn(make_agent("llama", gradient_checkpointing=on, batch_size=8), batch) for on in (True, False)
    ]
    assert results[0][0]["loss"] == results[1][0]["loss"]
    assert_close(results[0][1], results[1][1], 1e-12)


def test_transformers_own_labels_loss_agrees() -> None:
    agent = make_agent("llama", batch_size=8)
    batch = make_batch()
    labels = batch["input_ids"].clone()
    for row, prompt in enumerate(PROMPTS):
        labels[row, :prompt] = -100
        labels[row, LENGTHS[row] :] = -100
    theirs = agent.actor(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
    ).loss.item()
    assert agent.learn(batch, training=False)["loss"] == pytest.approx(theirs, rel=1e-6)


def test_real_valued_weights_replace_prompt_lengths() -> None:
    agent = make_agent("llama", batch_size=8, micro_batch_size_per_gpu=3)
    batch = make_batch()
    weights = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(5)) * batch["attention_mask"]
    weights[0, 2:5] = 0.0
    batch["response_weights"] = weights
    total, norm = 0.0, 0.0
    for row, length in enumerate(LENGTHS):
        ids, w = batch["input_ids"][row, :length], weights[row, 1:length].double()
        logits = agent.actor(input_ids=ids[None], use_cache=False).logits[0].double()
        total += (F.cross_entropy(logits[:-1], ids[1:], reduction="none") * w).sum().item()
        norm += w.sum().item()
    metrics = agent.learn(batch)
    assert metrics["loss"] == pytest.approx(total / norm, rel=1e-9)
    assert metrics["tokens"] == int((weights[:, 1:] != 0).sum())
