"""Where adapters go, how they start, and when two configurations are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from agilerl.errors import ModelError
from agilerl.models import adapt_lora_config_for_model, attach_lora, config_differences, find_head
from agilerl.models.lora import describe_adapters
from tests.helpers import tiny_model

IDS = torch.arange(6, 20).reshape(2, 7)


def lora(**settings: object) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **settings})  # type: ignore[arg-type]


def adapted(model: nn.Module) -> list[str]:
    """Paths of the adapted layers, relative to the plain model."""
    return [name.removeprefix("base_model.model.") for name, m in model.named_modules() if hasattr(m, "lora_A")]


def tiny_vision_model() -> nn.Module:
    """A Llava whose vision tower has layers of the same names as its language model."""
    text = {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 32,
    }
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=127)
    return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_a_fresh_adapter_is_exactly_the_base_model(settings: dict, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    before = model(input_ids=IDS).logits
    after = attach_lora(model, lora(**settings), seed=0)(input_ids=IDS).logits
    if settings.get("use_dora"):  # divides and multiplies by the same norm
        rounding = 0.05 if dtype == torch.bfloat16 else 1e-5
        assert (after - before).norm() <= rounding * before.norm()
    else:
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_adapters_are_float32_over_a_16_bit_base() -> None:
    model = attach_lora(tiny_model("llama", dtype=torch.bfloat16), lora(), seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_the_seed_alone_decides_the_adapter() -> None:
    def weights(seed: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = attach_lora(tiny_model("llama"), lora(), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [p.detach() for p in model.parameters() if p.requires_grad]

    first, second, other = weights(1, 10), weights(1, 11), weights(2, 10)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_callers_config_is_not_changed() -> None:
    for config in (lora(), lora(target_modules="all-linear"), lora(modules_to_save=["lm_head"])):
        before = copy.deepcopy(config.to_dict())
        attach_lora(tiny_model("llama"), config, seed=0)
        assert config.to_dict() == before


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"target_modules": ["q_proj", "qkv_typo"]}, "target_modules: 'qkv_typo'"),
        ({"target_modules": ["proj"]}, "target_modules: 'proj'"),
        ({"target_modules": r".*\.c_attn"}, r"target_modules='.*\\.c_attn' matches no layer"),
        ({"modules_to_save": ["lm_haed"]}, "modules_to_save: 'lm_haed'"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters: 'experts.gate'"),
    ],
)
def test_every_entry_must_match_and_candidates_are_listed(settings: dict, wrong: str) -> None:
    model = tiny_model("llama")
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=wrong) as error:
        attach_lora(model, lora(**settings), seed=0)
    assert "candidates are" in str(error.value)
    if "target_modules" in settings:
        assert "down_proj, gate_proj, k_proj" in str(error.value)
    assert [name for name, _ in model.named_modules()] == before


def test_no_target_at_all_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"target_modules is empty, so nothing would be adapted; name layers \(down_proj"
    ):
        attach_lora(tiny_model("llama"), lora(target_modules=[]), seed=0)


def test_a_layer_index_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot put this LoRA configuration on the model.*layers_to_transform"):
        attach_lora(tiny_model("llama"), lora(layers_to_transform=[7]), seed=0)


def test_targets_that_peft_has_no_default_for_are_asked_for() -> None:
    with pytest.raises(ModelError, match=r"target_modules is needed for model type 'olmo'.*candidates are"):
        attach_lora(tiny_model("olmo"), LoraConfig(r=2), seed=0)
    assert adapted(attach_lora(tiny_model("llama"), LoraConfig(r=2), seed=0))


def test_a_layer_that_lora_cannot_adapt_is_refused_in_a_sentence() -> None:
    with pytest.raises(ModelError, match=r"input_layernorm.*LlamaRMSNorm"):
        attach_lora(tiny_model("llama"), lora(target_modules=["input_layernorm"]), seed=0)


def test_adapters_are_not_stacked() -> None:
    model = tiny_model("llama")
    peft_model = attach_lora(model, lora(), seed=0)
    count = sum(1 for _ in peft_model.parameters())
    for again in (peft_model, model):
        with pytest.raises(ModelError, match="adapters already"):
            attach_lora(again, lora(), seed=0)
    assert sum(1 for _ in peft_model.parameters()) == count


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_all_linear_leaves_the_head_out_and_says_so(tied: bool) -> None:
    model = attach_lora(tiny_model("llama", tie_word_embeddings=tied), lora(target_modules="all-linear"), seed=0)
    assert len(adapted(model)) == 14
    assert "lm_head" not in adapted(model)
    assert describe_adapters(model).startswith("14 adapted layers (down_proj, gate_proj,")
    assert "head frozen" in describe_adapters(model)


def test_conv1d_layers_are_adapted_too() -> None:
    model = attach_lora(tiny_model("gpt2"), lora(target_modules="all-linear"), seed=0)
    assert {name.rpartition(".")[2] for name in adapted(model)} == {"c_attn", "c_proj", "c_fc"}
    assert describe_adapters(attach_lora(tiny_model("gpt2"), lora(target_modules=["c_attn"]), seed=0)).startswith("2 ")


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "head adapted"),
        ({"modules_to_save": ["lm_head"]}, "head trained in full"),
    ],
)
def test_the_heads_status_is_told(settings: dict, status: str) -> None:
    assert status in describe_adapters(attach_lora(tiny_model("llama"), lora(**settings), seed=0))


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_tied_head_is_untied_before_it_is_adapted(settings: dict) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model(input_ids=IDS).logits
    peft_model = attach_lora(model, lora(**settings), seed=0)
    assert model.config.tie_word_embeddings is False
    torch.testing.assert_close(peft_model(input_ids=IDS).logits, before, rtol=0, atol=0)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    adapted_logits = peft_model(input_ids=IDS).logits
    embedding = model.model.embed_tokens.weight.clone()
    merged = peft_model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(merged.model.embed_tokens.weight, embedding)


def test_a_tied_head_without_adapter_stays_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    attach_lora(model, lora(), seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert find_head(model).linear() is not None


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_every_adapter_gets_a_gradient_with_and_without_checkpointing(checkpointing: bool) -> None:
    def gradients(use: bool) -> dict[str, torch.Tensor]:
        model = attach_lora(tiny_model("llama"), lora(), seed=0).train()
        if use:
            model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    got, wanted = gradients(checkpointing), gradients(False)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name])
        assert "lora_B" not in name or gradient.abs().max() > 0


# --- scopes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", r".*\.(q_proj|v_proj)"])
def test_a_scope_keeps_adapters_out_of_the_vision_tower(targets: object) -> None:
    model = tiny_vision_model()
    config = lora(target_modules=targets)
    everywhere = adapted(attach_lora(tiny_vision_model(), config, seed=0))
    assert any("vision_tower" in name for name in everywhere)
    inside = adapted(attach_lora(model, config, seed=0, scope="language_model"))
    assert inside == [name for name in everywhere if "language_model" in name]
    assert config.target_modules == lora(target_modules=targets).target_modules


def test_scopes_match_whole_components() -> None:
    model = tiny_model("llama")
    for scope in ("lay", "ayers", "model.lay"):
        with pytest.raises(ValueError, match=f"no part called '{scope}'; candidates are .*layers"):
            adapt_lora_config_for_model(model, lora(), scope)
    config = adapt_lora_config_for_model(model, lora(), "layers")
    assert len(adapted(attach_lora(model, config, seed=0))) == 4


def test_a_scope_of_several_components() -> None:
    names = adapted(attach_lora(tiny_model("llama"), lora(), seed=0, scope="layers.1"))
    assert names == ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]


def test_a_scope_and_a_choice_of_layers_hold_together() -> None:
    names = adapted(attach_lora(tiny_model("llama"), lora(layers_to_transform=[1]), seed=0, scope="self_attn"))
    assert names == ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]


def test_the_decoder_is_the_language_model_whatever_it_is_called() -> None:
    names = adapted(attach_lora(tiny_model("llama"), lora(), seed=0, scope="language_model"))
    assert len(names) == 4


@pytest.mark.parametrize("targets", [["nothing"], r".*\.nothing", ["lm_head"]])
def test_a_scope_without_a_match_lists_what_is_there(targets: object) -> None:
    with pytest.raises(ValueError, match=r"candidates.* q_proj"):
        adapt_lora_config_for_model(tiny_model("llama"), lora(target_modules=targets), "layers")


def test_no_scope_is_a_plain_copy() -> None:
    config = lora()
    copied = adapt_lora_config_for_model(tiny_model("llama"), config)
    assert copied is not config
    assert copied.to_dict() == config.to_dict()


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_saved_config_is_the_same_as_the_live_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = attach_lora(tiny_model("llama"), lora(lora_dropout=0.1), seed=0)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = LoraConfig.from_pretrained(tmp_path / "actor")
    live = model.peft_config["actor"]
    assert config_differences(live, loaded) == {}
    assert config_differences(live, loaded.to_dict()) == {}
    assert config_differences(live, lora()) == {}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"r": 4}, "r"),
        ({"lora_alpha": 99}, "lora_alpha"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
    ],
)
def test_differences_that_matter_are_named(changed: dict, field: str) -> None:
    differences = config_differences(lora(), lora(**changed))
    assert list(differences) == [field]


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_dropout": 0.3},
        {"inference_mode": True},
        {"base_model_name_or_path": "/elsewhere"},
        {"exclude_modules": ["k_proj"]},
        {"target_modules": ["v_proj", "q_proj"]},
        {"init_lora_weights": "gaussian"},
        {"modules_to_save": []},
    ],
)
def test_differences_that_do_not_matter_are_not(changed: dict) -> None:
    assert config_differences(lora(), lora(**changed)) == {}


def test_the_result_loads_with_plain_peft(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = attach_lora(tiny_model("llama"), lora(), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "actor")
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=0)
