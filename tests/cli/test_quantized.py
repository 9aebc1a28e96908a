"""QLoRA on the command line: trained, measured, asked and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agilerl.algorithms import SFT
from agilerl.models.quantization import is_quantized
from agilerl.recipes.open import open_model
from tests.helpers import CHATML, tiny_model, tiny_tokenizer

pytest.importorskip("bitsandbytes")


@pytest.fixture
def wide_folder(tmp_path: Path) -> Path:
    """A model whose rows fill the blocks of 4-bit quantisation."""
    folder = tmp_path / "wide"
    tiny_model("llama", spread=0.1, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    tiny_tokenizer(chat_template=CHATML).save_pretrained(folder)
    return folder


def test_a_quantised_run_from_a_file(agilerl, rows, wide_folder: Path, tmp_path: Path) -> None:
    train, test = rows
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{name: {wide_folder}, quantization: nf4}}\n"
        f"data: {{train: {train}, test: {test}}}\n"
        "lora: {rank: 4}\nsft: {lr: 1e-2, batch_size: 4}\nlog: {console: plain}\n"
        f"evaluation: {{max_new_tokens: 4}}\noutput: {{path: {tmp_path / 'out'}}}\n"
    )
    code, out, err = agilerl("sft", file)
    assert code == 0, err
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(wide_folder).parameters())
    trained = sum(p.numel() for p in SFT.load(str(tmp_path / "out")).actor.parameters() if p.requires_grad)
    assert f"{trained:,} of {total + trained:,} parameters" in out
    held_out = [line.split("held-out loss ")[1].split()[0] for line in out.splitlines() if "held-out loss" in line]
    code, told, err = agilerl("evaluate", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(told)["loss"] == pytest.approx(float(held_out[-1]), abs=1e-4)  # in 4 bit, as in training

    assert agilerl("verify", tmp_path / "out")[0] == 0
    code, out, err = agilerl("merge", tmp_path / "out", tmp_path / "merged")
    assert (code, err) == (0, "")
    assert not is_quantized(open_model(str(tmp_path / "merged")).model)
    assert is_quantized(open_model(str(tmp_path / "out"), quantization="nf4").model)
    for words in (("out",), ("merged",), ("out", "--quantization", "nf4"), ("merged", "--quantization", "int8")):
        code, _, err = agilerl("chat", tmp_path / words[0], *words[1:], "-m", "abc", "--max-new-tokens", "3")
        assert (code, err) == (0, ""), words
