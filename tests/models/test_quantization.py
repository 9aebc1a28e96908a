"""4- and 8-bit bases on CPU: exact against their own dequantised weights, and still trainable after an evaluation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agilerl.algorithms import SFT
from agilerl.errors import ConfigError, MissingExtraError
from agilerl.losses import linear_cross_entropy
from agilerl.models import (
    Adapters,
    attach_lora,
    build_bnb_quantization_config,
    final_hidden_states,
    find_head,
    load_base_model,
    merge_adapter,
    share_base,
)
from agilerl.models.quantization import is_quantized, num_parameters, quantized_layers
from tests.helpers import random_rows, tiny_model

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.*MatMul8bitLt. inputs will be cast:UserWarning")

IDS = torch.arange(6, 38).reshape(2, 16) % 128
KINDS = ("nf4", "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model("llama", spread=0.1, hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder)
    return str(folder)


def spec(kind: str) -> BitsAndBytesConfig:
    config = build_bnb_quantization_config(kind)
    if kind == "nf4":  # in float32 the comparison with the dequantised model is tight
        config.bnb_4bit_compute_dtype = torch.float32
    return config


def load(base: str, kind: str) -> Any:
    return load_base_model(base, quantization_config=spec(kind), dtype=torch.float32)


def adapted(base: str, kind: str) -> PeftModel:
    model = attach_lora(load(base, kind), LoraConfig(r=4, target_modules="all-linear"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def loss_and_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    model.zero_grad()
    hidden = final_hidden_states(model, {"input_ids": IDS})[:, :-1].reshape(-1, 64)
    total, weight = linear_cross_entropy(hidden, find_head(model), IDS[:, 1:].reshape(-1), torch.ones(hidden.shape[0]))
    (total / weight).backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_stays_unquantised_and_the_callers_config_is_not_changed(base: str, kind: str) -> None:
    config = spec(kind)
    config.llm_int8_skip_modules = ["o_proj"]
    before = copy.deepcopy(config.to_dict())
    model = load_base_model(base, quantization_config=config)
    assert config.to_dict() == before
    assert type(model.lm_head) is nn.Linear
    names = {name.rpartition(".")[2] for name, _ in quantized_layers(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert find_head(model).linear() is not None


def test_four_bit_layers_are_never_repacked(base: str) -> None:
    """The flag itself: on a CPU without AVX512-BF16 the effect could not show."""
    for model in (load(base, "nf4"), adapted(base, "nf4"), share_base(adapted(base, "nf4"))):
        layers = [layer for _, layer in quantized_layers(model)]
        assert len(layers) == 14
        assert all(layer.support_avx512bf16_for_cpu is False for layer in layers)


def test_a_network_quantised_by_the_caller_is_protected_too(base: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, quantization_config=spec("nf4"))
    attach_lora(model, LoraConfig(r=2, target_modules=["q_proj"]), seed=0)
    assert all(layer.support_avx512bf16_for_cpu is False for _, layer in quantized_layers(model))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_before_training_changes_nothing(base: str, kind: str) -> None:
    fresh = loss_and_gradients(adapted(base, kind))
    evaluated = adapted(base, kind)
    first = logits(evaluated)
    torch.testing.assert_close(logits(evaluated), first, rtol=0, atol=0)
    loss, gradients = loss_and_gradients(evaluated)
    torch.testing.assert_close(loss, fresh[0], rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, fresh[1][name], rtol=1e-5, atol=1e-7)


def test_loss_and_adapter_gradients_equal_those_of_the_dequantised_weights(base: str) -> None:
    quantised = adapted(base, "nf4")
    plain = attach_lora(
        load_base_model(base, dtype=torch.float32), LoraConfig(r=4, target_modules="all-linear"), seed=0
    )
    modules = dict(plain.named_modules())
    for name, layer in quantized_layers(quantised):
        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        with torch.no_grad():
            modules[name].weight.copy_(weight)
    Adapters(plain).write("actor", Adapters(quantised).read("actor"))
    loss, gradients = loss_and_gradients(quantised)
    exact_loss, exact = loss_and_gradients(plain)
    torch.testing.assert_close(loss, exact_loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 1e-5 * exact[name].norm(), name


def test_four_bit_weights_take_less_than_45_percent_of_bfloat16(base: str) -> None:
    def size(layer: nn.Module) -> int:
        state = layer.weight.quant_state
        tables = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        return sum(t.numel() * t.element_size() for t in (layer.weight, *tables) if isinstance(t, Tensor))

    model = tiny_model("llama", hidden_size=256, intermediate_size=512)
    model.save_pretrained(Path(base) / "wide")
    layers = [layer for _, layer in quantized_layers(load(str(Path(base) / "wide"), "nf4"))]
    plain = sum(layer.in_features * layer.out_features * 2 for layer in layers)
    assert sum(map(size, layers)) < 0.45 * plain


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_count_as_what_they_stand_for(base: str, kind: str) -> None:
    plain = load_base_model(base)
    assert num_parameters(load(base, kind)) == num_parameters(plain) == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_clones_share_the_quantised_base(base: str, kind: str) -> None:
    model = adapted(base, kind)
    expected = logits(model)
    twin = share_base(model)
    pairs = list(zip(quantized_layers(model), quantized_layers(twin), strict=True))
    assert all(mine.weight is theirs.weight for (_, mine), (_, theirs) in pairs)
    torch.testing.assert_close(logits(twin), expected, rtol=0, atol=0)
    _, gradients = loss_and_gradients(twin)
    assert all(gradient is not None for gradient in gradients.values())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.sub_(gradients[name])
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_into_quantised_weights_warns_with_the_measured_error(base: str, kind: str) -> None:
    model = adapted(base, kind)
    wanted = logits(model)
    with pytest.warns(UserWarning, match=r"merged into quantised weights: logits moved by \d") as caught:
        merged = merge_adapter(model)
    assert len(caught) == 1
    assert is_quantized(merged.model)
    error = float((logits(merged.model) - wanted).abs().max() / wanted.abs().max())
    assert 0 < merged.error < 0.5
    assert 0 < error < 0.5


def batch() -> dict[str, Any]:
    return {
        "input_ids": torch.stack(random_rows([12, 12, 12, 12])),
        "attention_mask": torch.ones(4, 12, dtype=torch.long),
        "prompt_lengths": [2, 3, 4, 5],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_trains_saves_loads_and_merges(base: str, kind: str, tmp_path: Path) -> None:
    agent = SFT(
        0,
        "<pad>",
        model_name=base,
        model_config={"dtype": torch.float32},
        batch_size=4,
        lr=1e-2,
        lora_config=LoraConfig(r=4, target_modules="all-linear"),
        quantization_config=spec(kind),
        use_liger_loss=False,
    )
    logits(agent.actor)  # evaluated first
    losses = [agent.learn(batch())["loss"] for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    trained = logits(agent.actor)
    agent.save_checkpoint(str(tmp_path / "checkpoint"))

    loaded = SFT.load(str(tmp_path / "checkpoint"))
    assert is_quantized(loaded.actor)
    torch.testing.assert_close(logits(loaded.actor), trained, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(load(base, kind), str(tmp_path / "checkpoint"))), trained, rtol=1e-5, atol=1e-5
    )
    full = PeftModel.from_pretrained(load_base_model(base), str(tmp_path / "checkpoint"))
    unmerged = logits(full)
    merged = merge_adapter(full)
    assert not is_quantized(merged.model)
    torch.testing.assert_close(logits(merged.model), unmerged, rtol=1e-4, atol=1e-4)


def test_pissa_needs_the_full_weights(base: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="'pissa' changes the base weights"):
        attach_lora(load(base, "nf4"), config, seed=0)


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_nothing_to_quantise() -> None:
    assert build_bnb_quantization_config(None) is None
    assert build_bnb_quantization_config("none") is None
    ready = BitsAndBytesConfig(load_in_8bit=True)
    assert build_bnb_quantization_config(ready) is ready


@pytest.mark.parametrize("name", ["nf4", "NF4", "4bit", "4-bit", "bnb-4bit", "bnb_4bit"])
def test_the_names_of_four_bit(name: str) -> None:
    config = build_bnb_quantization_config(name)
    assert config is not None
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.bnb_4bit_quant_storage == torch.bfloat16


def test_eight_bit_and_dicts() -> None:
    assert build_bnb_quantization_config("int8").load_in_8bit
    config = build_bnb_quantization_config({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"})
    assert config.bnb_4bit_quant_type == "fp4"
    again = build_bnb_quantization_config(config.to_dict())
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ("int4", ConfigError, "Unknown quantisation 'int4'; allowed are 4-bit, 4bit, .*int8, nf4, none"),
        ({"load_in_4bits": True}, ConfigError, "Unknown quantisation setting load_in_4bits"),
        ({"bnb_4bit_quant_type": "nf4"}, ConfigError, "must set load_in_4bit or load_in_8bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, ConfigError, "do not fit together"),
        (4, TypeError, "not int"),
        (["nf4"], TypeError, "not list"),
    ],
)
def test_what_cannot_be_a_quantisation(bad: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build_bnb_quantization_config(bad)


def test_without_bitsandbytes_the_install_command_is_told(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.optional.has", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agilerl\[quant\]'"):
        load(base, "nf4")
    load_base_model(base)  # and nobody else asks for it
