"""Every kind of adapter through the real agent: it trains, saves, reloads and merges exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from agilerl.algorithms import SFT
from agilerl.checkpoint import base_fingerprint, same_base, verify
from agilerl.errors import CheckpointError, ModelError
from agilerl.models import attach_lora, merge_adapter, resize_embeddings
from tests.helpers import random_rows, tiny_model

IDS = torch.arange(6, 20).reshape(2, 7)
QV = ["q_proj", "v_proj"]
MOE = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}

NEW = [128, 129]
"""Tokens behind the vocabulary of the stored base."""
SETTINGS: dict[str, dict[str, Any]] = {
    # further settings of the agent
    "lora_plus": {"lora_plus_ratio": 4.0},
    "new_tokens": {"model_config": {"embedding_rows": 130}},
    "new_tokens_tied": {"model_config": {"embedding_rows": 130}},
}

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: family, fields of the model's configuration, fields of the LoRA configuration
    "plain": ("llama", {}, {"target_modules": QV}),
    "all_linear": ("llama", {}, {"target_modules": "all-linear"}),
    "rslora": ("llama", {}, {"target_modules": QV, "use_rslora": True}),
    "ranks": ("llama", {}, {"target_modules": QV, "rank_pattern": {"v_proj": 16}, "alpha_pattern": {"v_proj": 4}}),
    "ranks_rslora": ("llama", {}, {"target_modules": QV, "rank_pattern": {"v_proj": 16}, "use_rslora": True}),
    "dora": ("llama", {}, {"target_modules": QV, "use_dora": True}),
    "dora_ranks": ("llama", {}, {"target_modules": QV, "use_dora": True, "rank_pattern": {"v_proj": 8}}),
    "pissa": ("llama", {}, {"target_modules": QV, "init_lora_weights": "pissa"}),
    "olora": ("llama", {}, {"target_modules": QV, "init_lora_weights": "olora"}),
    "gaussian": ("llama", {}, {"target_modules": QV, "init_lora_weights": "gaussian"}),
    "lora_bias": ("qwen2", {}, {"target_modules": QV, "lora_bias": True}),
    "bias_all": ("qwen2", {}, {"target_modules": QV, "bias": "all"}),
    "bias_lora_only": ("qwen2", {}, {"target_modules": QV, "bias": "lora_only"}),
    "one_layer": ("llama", {}, {"target_modules": QV, "layers_to_transform": [1]}),
    "saved_head": ("llama", {}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved_head_tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved_norm": ("llama", {}, {"target_modules": QV, "modules_to_save": ["input_layernorm"]}),
    "saved_both_tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "head": ("llama", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "head_tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding": ("llama", {}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding_tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tokens": ("llama", {}, {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [6, 7]}}),
    "tokens_both": (
        "llama",
        {},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [6, 7], "lm_head": [6, 7]}},
    ),
    "tokens_tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [6, 7]}},
    ),
    "conv1d": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"]}),
    "experts": ("qwen3_moe", {}, MOE),
    "new_tokens": (
        "llama",
        {},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW}},
    ),
    "new_tokens_tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": NEW}},
    ),
    "lora_plus": ("llama", {}, {"target_modules": QV}),
    "regex": ("llama", {}, {"target_modules": r".*layers\.1\..*\.(q|v)_proj"}),
}


def network(kind: str, folder: Path) -> str:
    """A tiny base model saved to disk, so that ``load`` can find it."""
    family, model_fields, _ = KINDS[kind]
    tiny_model(family, spread=0.15, **model_fields).save_pretrained(folder)
    return str(folder)


def plain_base(kind: str, folder: str) -> Any:
    """The base as transformers loads it, with rows for the tokens that the kind adds."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if kind.startswith("new_tokens"):
        resize_embeddings(model, 130)
    return model


def batch(tokens: Sequence[int] = (6, 7)) -> dict[str, Any]:
    rows = random_rows([9, 6, 8, 7])
    ids, mask = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    ids[:, 2], ids[:, 5] = tokens  # the tokens that some kinds train
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [2, 1, 3, 2]}


def logits(model: Any, tokens: Sequence[int] = (6, 7)) -> Tensor:
    ids = IDS.clone()
    ids[0, :2] = torch.tensor(tokens)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def same(got: Tensor, wanted: Tensor, limit: float = 1e-5) -> None:
    assert torch.isfinite(got).all()
    assert float((got - wanted).abs().max() / wanted.abs().max()) <= limit


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # PEFT, where we load with PEFT
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_trains_saves_reloads_and_merges(kind: str, tmp_path: Path) -> None:
    base = network(kind, tmp_path / "base")
    agent = SFT(
        0,
        "<pad>",
        model_name=base,
        batch_size=4,
        lr=5e-2,
        max_grad_norm=10.0,
        lora_config=LoraConfig(r=4, lora_alpha=16, **KINDS[kind][2]),
        use_liger_loss=False,
        **SETTINGS.get(kind, {}),
    )
    tokens = NEW if kind.startswith("new_tokens") else (6, 7)
    initial = logits(agent.actor, tokens).clone()
    same(initial, logits(plain_base(kind, base), tokens), 2e-5)
    start = {name: p.detach().clone() for name, p in agent.actor.named_parameters() if p.requires_grad}
    for _ in range(3):
        agent.learn(batch(tokens))
    assert all(not torch.equal(p, start[name]) for name, p in agent.actor.named_parameters() if name in start)
    trained = logits(agent.actor, tokens).clone()
    assert float((trained - initial).abs().max() / initial.abs().max()) > 1e-2

    agent.save_checkpoint(str(tmp_path / "checkpoint"))
    same(logits(SFT.load(str(tmp_path / "checkpoint")).actor, tokens), trained)
    for place in ("checkpoint", "checkpoint/actor"):
        loaded = PeftModel.from_pretrained(plain_base(kind, base), str(tmp_path / place))
        same(logits(loaded, tokens), trained)
        merged = merge_adapter(loaded)
        same(logits(merged.model, tokens), trained)
        assert merged.error <= 1e-5

    merged = merge_adapter(agent.actor)
    same(logits(merged.model, tokens), trained)
    assert not any("lora" in name for name in merged.model.state_dict())
    merged.model.save_pretrained(tmp_path / "merged")
    same(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tokens), trained)


def adapted(dtype: torch.dtype = torch.float32, **fields: Any) -> PeftModel:
    model = attach_lora(tiny_model("llama", dtype=dtype), LoraConfig(r=4, **{"target_modules": QV, **fields}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def test_a_16_bit_base_is_rounded_once() -> None:
    model = adapted(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("actor")
    merged = merge_adapter(model)
    got = merged.model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(got, exact.bfloat16())
    assert 0 < merged.error < 0.1


def test_the_named_adapter_is_merged_whichever_is_active() -> None:
    model = adapted()
    wanted = logits(model)
    model.add_adapter("other", LoraConfig(r=2, target_modules=QV))
    model.set_adapter("other")
    same(logits(merge_adapter(model, "actor").model), wanted)
    with pytest.raises(ModelError, match="no adapter 'nobody'; the model has actor"):
        merge_adapter(adapted(), "nobody")


def test_a_broken_adapter_is_not_merged() -> None:
    model = adapted()
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))
    with pytest.raises(ModelError, match="cannot be merged: NaNs detected"):
        merge_adapter(model)


def test_a_merged_model_can_be_adapted_again() -> None:
    merged = merge_adapter(adapted()).model
    before = logits(merged)
    again = attach_lora(merged, LoraConfig(r=2, target_modules=QV), seed=3)
    same(logits(again), before)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_peft_model_whose_start_moved_the_base_comes_back(start: Any, tmp_path: Path) -> None:
    base = network("plain", tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=16, target_modules=QV, init_lora_weights=start)
    network_: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    agent = SFT(0, "<pad>", actor_network=network_, batch_size=4, lr=5e-2, use_liger_loss=False)
    agent.learn(batch())
    trained = logits(agent.actor).clone()
    agent.save_checkpoint(str(tmp_path / "checkpoint"))
    same(logits(SFT.load(str(tmp_path / "checkpoint")).actor), trained)
    report = verify(tmp_path / "checkpoint")
    assert report.is_ok, report.problems
    assert report.base.endswith("matches")
    (other := tiny_model("llama", seed=5)).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match="another base model"):
        SFT.load(str(tmp_path / "checkpoint"))
    assert same_base(base_fingerprint(other), base_fingerprint(agent.actor.get_base_model())) is False


@pytest.mark.parametrize("start", ["pissa_niter_4", "loftq", "eva", "corda"])
def test_starts_that_cannot_be_rebuilt_are_refused(start: Any) -> None:
    config = LoraConfig(r=4, target_modules=QV)
    config.init_lora_weights = start
    with pytest.raises(ValueError, match=f"init_lora_weights='{start}'"):
        attach_lora(tiny_model("llama"), config, seed=0)
