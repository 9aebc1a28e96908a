"""LoRA on routed experts through the agent: exact, checkpointed, saved and loaded as PEFT's."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel

from agilerl.algorithms.sft import SFT
from tests.algorithms.test_exactness import assert_close, gradients_of_learn, make_batch, reference
from tests.helpers import tiny_model


def config(**fields) -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], **fields
    )


def make_agent(recompute: bool | None = None, dtype: torch.dtype = torch.float64, **settings) -> SFT:
    model = tiny_model("qwen3_moe", dtype=dtype)
    model.set_experts_implementation("eager")
    agent = SFT(
        0,
        "<pad>",
        actor_network=model,
        lora_config=config(),
        batch_size=8,
        max_grad_norm=None,
        moe_lora_recompute=recompute,
        **settings,
    )
    if dtype == torch.float64:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in agent.actor.named_parameters():
                if "lora_" in name:
                    p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
        agent.reinit_optimizers()
    return agent


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_exact_with_and_without_recomputing(recompute: bool | None, checkpointing: bool) -> None:
    agent = make_agent(recompute, gradient_checkpointing=checkpointing, micro_batch_size_per_gpu=3)
    batch = make_batch()
    loss, grads = reference(agent.actor, batch)
    metrics, found = gradients_of_learn(agent, batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-10)
    assert sum("experts" in name for name in found) == 8
    assert_close(found, grads, 1e-10)


def test_checkpoints_are_pefts(tmp_path) -> None:
    agent = make_agent(dtype=torch.float32, lr=1e-2)
    for _ in range(3):
        agent.learn(make_batch())
    agent.save_checkpoint(tmp_path)
    base = tiny_model("qwen3_moe")
    base.set_experts_implementation("eager")
    loaded = PeftModel.from_pretrained(base, tmp_path)
    ids = make_batch()["input_ids"][:1]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, agent.actor(input_ids=ids).logits, atol=1e-5)


def test_dropout_on_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout"):
        SFT(0, "<pad>", actor_network=tiny_model("qwen3_moe"), lora_config=config(lora_dropout=0.1))


def test_recompute_without_expert_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_lora_recompute needs LoRA on routed experts"):
        SFT(
            0,
            "<pad>",
            actor_network=tiny_model("llama"),
            lora_config=LoraConfig(target_modules=["q_proj"]),
            moe_lora_recompute=True,
        )
