"""What needs a CUDA device: each path against the one that the CPU tests hold to float64. Run with scripts/test-gpu."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from agilerl.algorithms.sft import SFT
from agilerl.losses import linear_cross_entropy
from agilerl.models.head import Head
from tests.algorithms.test_exactness import make_batch
from tests.helpers import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_agent(dtype: torch.dtype = torch.float32, **settings) -> SFT:
    model = tiny_model("llama", dtype=dtype, hidden_size=64, intermediate_size=128)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    given = {"device": "cuda", "batch_size": 8, "lr": 1e-3} | settings
    return SFT(0, "<pad>", actor_network=model, lora_config=config, **given)


def after_steps(agent: SFT, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    losses = [agent.learn(make_batch())["loss"] for _ in range(steps)]
    return losses, {n: p.detach().cpu() for n, p in agent.actor.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_liger_equals_the_packages_own_loss(softcap: float | None) -> None:
    pytest.importorskip("liger_kernel")
    from agilerl.losses.liger import liger_cross_entropy

    generator = torch.Generator("cuda").manual_seed(0)
    linear = torch.nn.Linear(64, 1000, bias=False, device="cuda").requires_grad_(False)
    head = Head(linear, 0.5, softcap)
    targets = torch.randint(0, 1000, (200,), generator=generator, device="cuda")
    weights = torch.full((200,), 2.0, device="cuda")
    found = []
    for loss in (liger_cross_entropy, linear_cross_entropy):
        hidden = torch.randn(
            200, 64, generator=torch.Generator("cuda").manual_seed(1), device="cuda", requires_grad=True
        )
        total = loss(hidden, head, targets, weights).total
        total.backward()
        assert hidden.grad is not None
        found.append((total.item(), hidden.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_training_follows_the_cpu(dtype: torch.dtype) -> None:
    gpu, _ = after_steps(make_agent(dtype))
    cpu, _ = after_steps(make_agent(dtype, device="cpu"))
    assert gpu == pytest.approx(cpu, rel=1e-4 if dtype == torch.float32 else 3e-2)


def test_padding_free_equals_alone_in_bfloat16() -> None:
    agent = make_agent(torch.bfloat16, gradient_checkpointing=True)
    assert agent.packing[0] == "packed"
    together = agent.learn(make_batch(), training=False)["loss"]
    batch = make_batch()
    total = weight = 0.0
    for row, prompt in enumerate(batch["prompt_lengths"]):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1][None]
        alone = agent.learn(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [prompt]}, training=False
        )
        total, weight = total + alone["loss"] * alone["tokens"], weight + alone["tokens"]
    assert together == pytest.approx(total / weight, rel=1e-2)


def test_activation_offload_changes_nothing() -> None:
    plain, offloaded = (
        after_steps(make_agent(activation_offload=on, gradient_checkpointing=False)) for on in (False, True)
    )
    assert plain[0] == pytest.approx(offloaded[0], rel=1e-6)  # kernels may add up in another order
    assert all(torch.allclose(tensor, offloaded[1][name], atol=1e-6) for name, tensor in plain[1].items())


def test_compiled_blocks_train_alike() -> None:
    agent, compiled = make_agent(gradient_checkpointing=False), make_agent(gradient_checkpointing=False)
    compiled.recompile()
    assert after_steps(compiled, 2)[0] == pytest.approx(after_steps(agent, 2)[0], rel=1e-4)
