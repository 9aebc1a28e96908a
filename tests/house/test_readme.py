"""What the README says holds: its Python example runs as it stands, its files and commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.cli import COMMANDS
from tests.examples.small import surround

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_block() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return block


def test_python_example_is_the_file_in_examples() -> None:
    example = (ROOT / "examples" / "sft.py").read_text(encoding="utf-8")
    assert example.split('"""\n\n', 1)[1] == python_block()


def test_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = surround(tmp_path, monkeypatch, "qwen2")
    names: dict = {"__name__": "__main__"}
    exec(compile(python_block(), "README.md", "exec"), names)  # the README's own words, on a tiny model

    saved = tmp_path / "outputs" / "example"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Set a timer.", return_tensors="pt")["input_ids"]
    agent = names["agent"]
    agent.actor.eval()
    assert agent.steps == 320
    assert AutoTokenizer.from_pretrained(saved).chat_template == tokenizer.chat_template
    for place in (saved, saved / "actor"):
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(place)).eval()
        torch.testing.assert_close(again(ids).logits, agent.actor(ids).logits, rtol=0, atol=1e-6)
    agent.clean_up()


def test_files_and_commands_it_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in link:
            assert (ROOT / link).exists(), link
    commands = set(re.findall(r"^agilerl ([a-z]+)", README, flags=re.MULTILINE))
    assert commands
    assert commands <= set(COMMANDS)
    for script in re.findall(r"^scripts/[\w-]+", README, flags=re.MULTILINE):
        assert (ROOT / script).exists(), script


def test_the_index_of_the_docs_names_every_page_and_links_hold() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert page.name == "README.md" or index.count(f"]({page.name})") == 1, page.name
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_table_of_places_to_change_is_true() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## To change X, open Y")[1].split("\n## ")[0]
    places = re.findall(r"`([a-z_/.-]+)`", table)
    assert len(places) > 12
    for place in places:
        assert (ROOT / place).exists() or (ROOT / "agilerl" / place).exists(), place
