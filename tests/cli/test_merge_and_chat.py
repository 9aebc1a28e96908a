from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from agilerl.recipes.evaluation import words_asked
from agilerl.recipes.open import open_model
from tests.helpers import CHATML, tiny_tokenizer


@pytest.fixture
def checkpoint(sft, tmp_path):
    code, _, err = sft("sft.lr=1e-1", "sft.batch_size=4", "evaluation.enabled=no")
    assert code == 0, err
    return tmp_path / "out"


def test_merged_models_answer_like_the_adapter(agilerl, checkpoint, tmp_path):
    code, out, err = agilerl("merge", checkpoint, tmp_path / "merged")
    assert (code, err) == (0, "")
    assert f"agilerl chat {tmp_path / 'merged'}" in out
    ids = torch.arange(5, 15)[None]
    opened = open_model(str(checkpoint))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(opened.base)
    # Computed in float64, only the rounding of the merged weights remains: float32 steps of adapters this large do not
    # agree to more digits than the machine's own order of summing allows.
    with torch.no_grad():
        wanted, got, plain = (model.double()(input_ids=ids).logits for model in (opened.model, merged, base))
    assert torch.allclose(got, wanted, atol=1e-4)
    assert not torch.allclose(plain, wanted, atol=1e-2)
    adapter = agilerl("chat", checkpoint, "-m", "abc", "--max-new-tokens", "5")
    assert agilerl("chat", tmp_path / "merged", "-m", "abc", "--max-new-tokens", "5") == adapter


def test_merging_never_replaces_something_else(agilerl, checkpoint, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for output in (tmp_path / "full", checkpoint):
        code, _, err = agilerl("merge", checkpoint, output, "--overwrite")
        assert code == 2
        assert "exists already" in err
    assert (tmp_path / "full" / "thesis.tex").exists()
    assert agilerl("merge", checkpoint, tmp_path / "merged")[0] == 0
    assert agilerl("merge", checkpoint, tmp_path / "merged")[0] == 2
    assert agilerl("merge", checkpoint, tmp_path / "merged", "--overwrite")[0] == 0
    assert "ordinary model already" in agilerl("merge", tmp_path / "merged", tmp_path / "again")[2]


def test_chat_takes_checkpoint_adapter_file_and_base(agilerl, checkpoint, model_folder, tmp_path):
    ask = ["--message", "abc", "--max-new-tokens", "4"]
    wanted = agilerl("chat", checkpoint, *ask)
    assert wanted[0] == 0
    assert agilerl("chat", checkpoint / "actor", *ask) == wanted
    assert agilerl("chat", checkpoint / "adapter_model.safetensors", *ask) == wanted
    assert agilerl("chat", checkpoint, "--base", model_folder, *ask) == wanted
    code, _, err = agilerl("chat", checkpoint, "--base", tmp_path / "moved", *ask)
    assert code == 2
    assert "base model" in err


def test_chat_on_folders_without_a_model_lists_what_is_there(agilerl, checkpoint):
    code, _, err = agilerl("chat", checkpoint / "logs", "-m", "x")
    assert code == 2
    assert "found: metrics.csv" in err


def test_an_adapter_with_a_missing_tensor_is_refused(agilerl, checkpoint, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint / "actor", copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, copy / "adapter_model.safetensors")
    code, _, err = agilerl("chat", copy, "-m", "x")
    assert code == 2
    assert "incomplete" in err


def test_a_conversation_keeps_its_turns_and_forgets_on_reset(agilerl, checkpoint, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n/reset\nabc\nabc\n/exit\nnever\n"))
    code, out, _ = agilerl("chat", checkpoint, "--max-new-tokens", "4")
    first, second, third = out.splitlines()
    assert code == 0
    assert first == second
    assert third != first  # with the earlier turns before it, the same words are another question


def test_words_asked_are_those_of_the_person():
    tokenizer = tiny_tokenizer(chat_template=CHATML)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "user said: hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert words_asked(tokenizer, ids) == "user said: hi"
    assert words_asked(tokenizer, tokenizer("plain words").input_ids) == "plain words"


@pytest.mark.parametrize("temperature", ["inf", "nan", "-1", "-inf"])
def test_temperatures_that_nothing_can_be_drawn_at(agilerl, temperature):
    code, out, err = agilerl("chat", "no/such/model", "-m", "x", f"--temperature={temperature}")
    assert (code, out) == (2, "")
    assert "must be a finite number of at least 0" in err
