"""Names to models, and the one sentence that a wrong name gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.errors import ModelError
from agilerl.models import load_base_model, load_tokenizer
from tests.helpers import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat_template="chatml").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(name: Any, match: str, load: Any = load_base_model, **kwargs: Any) -> None:
    with pytest.raises(ModelError, match=match) as error:
        load(name, **kwargs)
    assert isinstance(error.value, ValueError)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert "\n" not in str(error.value)


def test_a_folder_is_loaded_as_it_was_stored(folder: Path) -> None:
    model = load_base_model(str(folder))
    assert model.dtype == torch.bfloat16
    assert load_base_model(str(folder), dtype=torch.float32).dtype == torch.float32
    assert load_base_model(str(folder), model_config={"torch_dtype": torch.float32}).dtype == torch.float32
    eager = load_base_model(str(folder), model_config={"attn_implementation": "eager"})
    assert eager.config._attn_implementation == "eager"
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer("Hello you")["input_ids"]) == "Hello you"
    assert tokenizer.chat_template


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "torch.float32"])
def test_a_dtype_may_be_spelt_out(folder: Path, dtype: Any) -> None:
    assert load_base_model(str(folder), model_config={"dtype": dtype}).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float23", "int8", "cuda"])
def test_a_dtype_that_is_none(folder: Path, dtype: str) -> None:
    refused(str(folder), f"dtype='{dtype}' is not a floating type", dtype=dtype)


def test_the_callers_settings_are_not_changed(folder: Path) -> None:
    settings = {"torch_dtype": torch.float32}
    load_base_model(str(folder), model_config=settings)
    assert settings == {"torch_dtype": torch.float32}


def test_a_folder_without_a_model_says_what_is_in_it(tmp_path: Path) -> None:
    refused(str(tmp_path), r"holds no model: there is no config.json in it \(found: nothing\)")
    (tmp_path / "notes.txt").write_text("x")
    refused(str(tmp_path), r"found: notes.txt")


def test_an_adapter_folder_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    refused(str(tmp_path), "holds an adapter of 'some/base', not a whole model")


def test_a_missing_folder_or_a_file(tmp_path: Path) -> None:
    refused(str(tmp_path / "nowhere"), "nowhere does not exist")
    refused("./nowhere", r"\./nowhere does not exist")
    (tmp_path / "file").write_text("x")
    refused(str(tmp_path / "file"), "is a file, not a folder")


def test_damaged_folders(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    refused(str(folder), "The model in .* cannot be loaded")
    (folder / "model.safetensors").unlink()
    refused(str(folder), "The model in .* cannot be loaded.*no file named model.safetensors")
    (folder / "config.json").write_text("{")
    refused(str(folder), "The model in .* cannot be loaded")
    (folder / "config.json").write_text('{"model_type": "never_heard_of"}')
    refused(str(folder), "The model in .* cannot be loaded.*never_heard_of")


def test_weights_of_another_shape(folder: Path) -> None:
    config = (folder / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    (folder / "config.json").write_text(config)
    refused(str(folder), "The model in .* cannot be loaded")


def test_missing_weights_are_not_drawn_at_random(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(str(folder), r"lacks weights of LlamaForCausalLM: model.layers.1.self_attn.q_proj.weight")


def test_a_name_that_is_nowhere() -> None:
    refused("nobody/nothing", "neither a preset, a folder here nor reachable on the Hub")
    refused("nobody/nothing", "The tokenizer 'nobody/nothing' is neither", load=load_tokenizer)
    refused("what is this", "The model 'what is this' is neither")


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2_135m", "smollm2-135"])
def test_a_near_miss_of_a_preset_is_named(name: str) -> None:
    refused(name, "did you mean the preset 'smollm2-135m'")


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_no_name(name: Any) -> None:
    refused(name, "A model name is a preset, a folder or a name on the Hub")


def test_unknown_settings_are_named(folder: Path) -> None:
    refused(str(folder), "attn_implementaton", model_config={"attn_implementaton": "eager"})


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    text = (folder / "config.json").read_text()
    auto = '"auto_map": {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},'
    (folder / "config.json").write_text(text.replace("{", "{" + auto, 1).replace('"llama"', '"evil"'))
    refused(str(folder), "trust_remote_code")
    assert not marker.exists()
