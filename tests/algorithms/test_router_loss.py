"""The balance of a mixture of experts: the plain formula, whatever the batch is cut into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from agilerl.algorithms import SFT
from agilerl.errors import ConfigError, UnsupportedError
from agilerl.models.router_loss import balance_loss
from agilerl.models.segments import choose_packer
from tests.helpers import random_rows, tiny_model

LENGTHS = [9, 4, 7, 5]
COEF = 0.3


def batch() -> dict[str, Any]:
    rows = random_rows(LENGTHS)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [2, 1, 3, 1]}


def agent_of(family: str = "mixtral", **settings: Any) -> SFT:
    model = tiny_model(family, dtype=torch.float64)
    given = {"batch_size": 4, "max_grad_norm": None, "router_aux_loss_coef": COEF} | settings
    return SFT(pad_token_id=0, pad_token="<pad>", actor_network=model, **given)


def plain(model: Any, rows: list[torch.Tensor], k: int, sigmoid: bool) -> torch.Tensor:
    """The formula of the paper on each row alone, by hand."""
    losses = []
    for ids in rows:
        layers = []
        seen: list[Any] = []
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        handles = [
            router.register_forward_hook(lambda _m, _a, output, seen=seen: seen.append(output)) for router in routers
        ]
        model(input_ids=ids[None])
        for handle in handles:
            handle.remove()
        for logits, _, choices in seen:
            scores = logits.sigmoid() if sigmoid else logits.exp()
            p = scores / scores.sum(-1, keepdim=True)
            experts = logits.shape[-1]
            f = [experts / (k * len(ids)) * float((choices == e).sum()) for e in range(experts)]
            layers.append(sum(f[e] * p[:, e].sum() / len(ids) for e in range(experts)))
        losses.append(sum(layers) / len(layers) * len(ids))
    return sum(losses) / sum(map(len, rows))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_equals_the_formula_and_its_gradient(family: str) -> None:
    agent = agent_of(family)
    data = batch()
    rows = random_rows(LENGTHS)
    model = agent.actor
    k = model.config.num_experts_per_tok
    wanted = plain(model, rows, k, family == "deepseek_v3")
    nll = torch.zeros((), dtype=torch.float64)
    for ids, prompt in zip(rows, data["prompt_lengths"], strict=True):
        logits = model(input_ids=ids[None]).logits[0]
        nll = nll + torch.nn.functional.cross_entropy(logits[prompt - 1 : -1], ids[prompt:], reduction="sum")
    nll = nll / sum(len(ids) - prompt for ids, prompt in zip(rows, data["prompt_lengths"], strict=True))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(nll + COEF * wanted, [model.get_parameter(name) for name in names], allow_unused=True)
    found = agent.learn(data)
    assert found["router_aux_loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert found["loss"] == pytest.approx(nll.item(), rel=1e-6)
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            mine = agent.actor.get_parameter(name).grad
            torch.testing.assert_close(mine, grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_no_micro_batch_and_no_padding_changes_it(path: str) -> None:
    results = []
    for size in (4, 1):
        agent = agent_of(lora_config=LoraConfig(r=2, target_modules=["q_proj"]), micro_batch_size_per_gpu=size)
        resources = agent._resources
        resources.packer = choose_packer(agent.actor, prefer=path)
        agent._adopt(resources)
        before = agent.learn(batch(), training=False)["router_aux_loss"]
        found = agent.learn(batch())
        assert found["router_aux_loss"] == pytest.approx(before, rel=1e-9)
        grads = [p.grad for p in agent.actor.parameters() if p.requires_grad]
        results.append((before, torch.cat([grad.flatten() for grad in grads])))
    reference = agent_of(lora_config=LoraConfig(r=2, target_modules=["q_proj"]))
    wanted = reference.learn(batch())["router_aux_loss"]  # the path that the probe chose
    for value, grads in results:
        assert value == pytest.approx(wanted, rel=1e-7)
        torch.testing.assert_close(grads, results[0][1], rtol=1e-5, atol=1e-9)


def test_even_use_is_one_and_a_single_expert_the_most() -> None:
    rows = torch.tensor([0, 0, 0, 0, -1])
    even = torch.full((5, 4), 0.25)
    choices = torch.tensor([[0], [1], [2], [3], [0]])
    assert float(balance_loss([(even, choices)], rows, 1)) == pytest.approx(4 * 1.0)  # summed over four tokens
    alone = torch.zeros(5, 4)
    alone[:, 2] = 1.0
    assert float(balance_loss([(alone, torch.full((5, 1), 2))], rows, 1)) == pytest.approx(4 * 4.0)


def test_refused_without_routers_and_off_by_default() -> None:
    with pytest.raises(UnsupportedError, match="needs a mixture of experts"):
        agent_of("llama")
    with pytest.raises(ConfigError, match="router_aux_loss_coef must be a finite number"):
        agent_of(router_aux_loss_coef=-1.0)
    assert "router_aux_loss" not in agent_of(router_aux_loss_coef=0.0).learn(batch(), training=False)


def test_clones_and_checkpoints_keep_it(tmp_path) -> None:
    agent = agent_of(lora_config=LoraConfig(r=2, target_modules=["q_proj"]))
    assert "router_aux_loss" in agent.clone().learn(batch(), training=False)
    assert agent.settings.describe()["router_aux_loss_coef"] == COEF
