"""Rows with images on the command line: from a data file beside its pictures to a folder that answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoProcessor

from agilerl.algorithms import SFT
from agilerl.models import load_base_model
from agilerl.models.build import takes_images
from tests.helpers import tiny_model, tiny_tokenizer, tiny_vision_model
from tests.vision import TEMPLATE, idefics_processor, llava_processor, picture

COLORS = ("red", "blue", "green", "white", "black", "yellow")
QUICK = ("log.console=plain", "evaluation.max_new_tokens=3", "training.max_steps=6", "sft.batch_size=2")


@pytest.fixture(params=["llava", "idefics3"])
def vision_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "vlm"
    tiny_vision_model(request.param, spread=None).save_pretrained(folder)
    processor = llava_processor() if request.param == "llava" else idefics_processor()
    processor.chat_template = TEMPLATE
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with a column of images, and rows with image parts, both beside a folder of pictures."""
    folder = tmp_path / "set"
    (folder / "pictures").mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for color in COLORS:
        picture(color).save(folder / "pictures" / f"{color}.png")
        records.append({"prompt": "What?", "response": color, "images": [f"pictures/{color}.png"]})
    part = {"type": "image", "image": "pictures/red.png"}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "And?"}]}]
    records.append({"prompt": asked, "response": "red", "images": None})
    records.append({"prompt": "No picture", "response": "none", "images": None})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_run_trains_measures_saves_and_is_used(agilerl, vision_folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = agilerl("sft", "--model", vision_folder, "--data", data, "--output", out, "data.test_share=0.3", *QUICK)
    assert said[0] == 0, said[2]
    assert "rows have images" in said[1]
    assert "exact match" in said[1]
    loaded = SFT.load(str(out))
    assert type(loaded.tokenizer) is type(AutoProcessor.from_pretrained(vision_folder))  # the next save keeps it
    assert AutoProcessor.from_pretrained(out).chat_template == TEMPLATE
    names = [name for name, p in loaded.actor.named_parameters() if p.requires_grad]
    assert names
    assert not any("vision" in name or "connector" in name for name in names)
    base = load_base_model(str(vision_folder))
    wanted = {name: p for name, p in base.named_parameters() if "vision" in name}
    inner: Any = PeftModel.from_pretrained(load_base_model(str(vision_folder)), str(out)).get_base_model()
    assert wanted
    assert all(torch.equal(inner.get_parameter(name), p) for name, p in wanted.items())
    for place in (out, merged(agilerl, out, tmp_path)):
        code, _, err = agilerl("chat", place, "-m", "What?", "--max-new-tokens", "3")
        assert (code, err) == (0, "")
    code, told, err = agilerl("evaluate", out, "--data", data, "--json", "evaluation.max_new_tokens=3")
    assert code == 0, err
    assert json.loads(told)["answered"] == 8
    assert agilerl("verify", out)[0] == 0


def merged(agilerl: Any, out: Path, tmp_path: Path) -> Path:
    code, _, err = agilerl("merge", out, tmp_path / "merged")
    assert (code, err) == (0, "")
    assert AutoProcessor.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE
    return tmp_path / "merged"


def test_a_run_goes_on_with_its_pictures(agilerl, vision_folder: Path, data: Path, tmp_path: Path) -> None:
    run = ("sft", "--model", vision_folder, "--data", data, "data.test_share=0.3", "evaluation.enabled=no", *QUICK)
    out = tmp_path / "out"
    assert agilerl(*run, "--output", out, "training.max_steps=2")[0] == 0
    assert agilerl("sft", "--resume", out, "training.max_steps=6")[0] == 0
    assert agilerl(*run, "--output", tmp_path / "straight")[0] == 0
    first, second = (SFT.load(str(place)) for place in (out, tmp_path / "straight"))
    for (name, mine), theirs in zip(first.actor.named_parameters(), second.actor.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    shutil.move(vision_folder / "processor_config.json", tmp_path)  # a second stage takes the one that was saved
    code, _, err = agilerl("sft", "--model", out, "--data", data, "--output", tmp_path / "next", *run[5:])
    assert code == 0, err
    assert AutoProcessor.from_pretrained(tmp_path / "next").chat_template == TEMPLATE


def test_inspecting_shows_the_places_of_images(agilerl, vision_folder: Path, data: Path, tmp_path: Path) -> None:
    code, out, err = agilerl("inspect", "--model", vision_folder, "--data", data, "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert "<image><image>" in json.dumps(rows)
    code, out, _ = agilerl("inspect", "--model", vision_folder, "--data", data)
    assert "7 of 8 rows have images" in out


def test_paths_begin_at_the_data_file_else_where_one_is(
    agilerl, vision_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "elsewhere.jsonl"
    broken.write_text(data.read_text(encoding="utf-8"), encoding="utf-8")
    run = ("sft", "--model", vision_folder, "--data", broken, "data.test_share=0.3", "evaluation.enabled=no", *QUICK)
    code, _, err = agilerl(*run, "--output", tmp_path / "out")
    assert code == 2
    assert "an image that cannot be opened" in err
    assert "pictures/red.png" in err
    monkeypatch.chdir(data.parent)
    assert agilerl(*run, "--output", tmp_path / "out")[0] == 0


def test_parquet_with_the_bytes_of_images(agilerl, vision_folder: Path, data: Path, tmp_path: Path) -> None:
    images = [(data.parent / "pictures" / f"{color}.png").read_bytes() for color in COLORS]
    rows = [
        {"prompt": "What?", "response": color, "image": {"bytes": held, "path": f"{color}.png"}}
        for color, held in zip(COLORS, images, strict=True)
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    run = ("--data", tmp_path / "rows.parquet", "data.test_share=0.3", "evaluation.enabled=no", *QUICK)
    code, out, err = agilerl("sft", "--model", vision_folder, *run, "--output", tmp_path / "out")
    assert code == 0, err
    assert "rows have images" in out


def test_text_alone_needs_no_processor(agilerl, vision_folder: Path, tmp_path: Path) -> None:
    (vision_folder / "processor_config.json").unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{n}", "response": "b"}) + "\n" for n in range(8)))
    run = ("--data", rows, "data.test_share=0.3", "evaluation.enabled=no", *QUICK)
    code, out, err = agilerl("sft", "--model", vision_folder, *run, "--output", tmp_path / "out")
    assert code == 0, err
    assert "images" not in out


def test_what_cannot_be_done_is_said(agilerl, vision_folder: Path, data: Path, tmp_path: Path) -> None:
    run = ("--data", data, "--output", tmp_path / "out", *QUICK)
    code, _, err = agilerl("sft", "--model", vision_folder, *run, "--test-data", data, "data.streaming=yes")
    assert (code, "Rows with images cannot be streamed" in err) == (2, True), err
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": "What?", "chosen": "a", "rejected": "b", "images": ["pictures/red.png"]}
    pairs.write_text(json.dumps(pair) + "\n")
    code, _, err = agilerl("dpo", "--model", vision_folder, "--data", pairs, "--output", tmp_path / "out")
    assert (code, "pairs with images cannot be trained" in err) == (2, True), err
    (vision_folder / "processor_config.json").unlink()
    code, _, err = agilerl("sft", "--model", vision_folder, *run)
    assert (code, "has no processor for images" in err) == (2, True), err
    tiny_model("llama").save_pretrained(tmp_path / "words")
    tiny_tokenizer(chat_template="chatml").save_pretrained(tmp_path / "words")
    assert not takes_images(str(tmp_path / "words"))
    code, _, err = agilerl("sft", "--model", tmp_path / "words", *run)
    assert (code, "only the processor of a vision-language model" in err) == (2, True), err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("actor"))
