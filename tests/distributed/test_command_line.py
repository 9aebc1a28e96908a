"""The same command on one process and on two: the same adapters, the same lineage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file

from agilerl.algorithms import SFT
from agilerl.cli import main
from agilerl.models import load_tokenizer
from tests.distributed.launch import ROOT
from tests.helpers import tiny_model, tiny_tokenizer, tiny_vision_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A tiny model, 37 uneven rows, and the words of a run on them."""
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer(all_bytes=True)
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, count in (("train", 37), ("test", 9)):
        rows = [
            {"prompt": f"say {'abc' * (1 + i % 4)} in {split}", "response": f"{'xy' * (1 + i % 5)} {i}"}
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        f"model.name={folder / 'model'}",
        "model.device=cpu",
        f"data.train={folder / 'train.jsonl'}",
        f"data.test={folder / 'test.jsonl'}",
        "data.data_batch_size_per_gpu=4",
        "sft.batch_size=8",
        "sft.lr=1e-3",
        "lora.rank=4",
        "evaluation.exact_match=false",
    ]
    return folder, words


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """``agilerl`` in a process of its own."""
    command = [sys.executable, "-m", "agilerl", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def lineage(folder: Path) -> list[dict[str, Any]]:
    """Who came from whom and what was changed; fitness is equal to rounding only."""
    rows = [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "fitness"} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("evolving", [False, True])
def test_two_processes_give_the_result_of_one(job: tuple[Path, list[str]], evolving: bool) -> None:
    folder, words = job
    if evolving:
        words = [*words, "evolution.population_size=3", "evolution.evo_steps=2", "training.epochs=2"]
    outputs = [folder / f"out{number}_{evolving}" for number in (1, 2)]
    one = run(["sft", *words, f"output.path={outputs[0]}"])
    two = run(["launch", "--procs", "2", "sft", *words, f"output.path={outputs[1]}"])
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Saved to") == 1  # rank 0 speaks alone
    mine, theirs = (load_file(output / "adapter_model.safetensors") for output in outputs)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.allclose(tensor, theirs[name], atol=1e-5), name
    if evolving:
        assert lineage(outputs[0]) == lineage(outputs[1])
        assert lineage(outputs[0])


@pytest.mark.slow
def test_a_mistake_ends_a_launch_with_its_sentence_and_code(job: tuple[Path, list[str]]) -> None:
    _, words = job
    ended = run(["launch", "--procs", "2", "sft", *words, "sft.batch_size=7", "output.path=unused"])
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "7" in ended.stderr


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.name=no/such-model", "The settings of the model 'no/such-model' cannot be read"),
        ("lora.target_modules=[q_proj,typo]", "'typo' matches no layer of the model"),
    ],
)
def test_mistakes_in_a_plan_are_a_sentence(
    job: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], word: str, says: str
) -> None:
    assert main(["plan", *job[1], word]) == 2
    assert says in capsys.readouterr().err


def test_plan_reads_settings_only(job: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    _, words = job
    arguments = ["plan", *words, "--tflops", "0.001", "--json"]
    assert main([*arguments, "--memory", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["peak_mib"] == pytest.approx(sum(found["parts_mib"].values()), abs=1.0)
    assert found["step_seconds"] > 0
    assert main([*arguments, "--memory", "0.001"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["advice"]
    assert main([*arguments, "--procs", "2", "fsdp.enabled=true", "--memory", "4"]) == 0
    assert "gathered" in json.loads(capsys.readouterr().out)["parts_mib"]


def test_a_plan_knows_what_the_heap_keeps(
    job: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory freed in backward stays in the heap of the C library, unless arrays are mapped."""
    _, words = job
    arguments = ["plan", *words, "--longest", "2048", "--tflops", "1", "--memory", "0.001", "--json"]
    found = []
    for threshold in ("", "1024"):
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
        assert main(arguments) == 1
        found.append(json.loads(capsys.readouterr().out))
    held, mapped = (one["parts_mib"].pop("allocator") for one in found)
    assert held > 1
    assert mapped == 0
    assert found[0]["parts_mib"] == found[1]["parts_mib"]
    assert any("MALLOC_MMAP_THRESHOLD_=" in line for line in found[0]["advice"]) == (held > found[0]["step_mib"] / 8)


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_a_plan_of_a_run_that_goes_on_from_a_checkpoint(
    job: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The parts are those of the model and the adapter in the checkpoint, whatever the lora section says."""
    folder, words = job
    tokenizer = load_tokenizer(str(folder / "model"))
    lora = LoraConfig(r=2, target_modules=["q_proj"]) if kind == "adapter" else None
    agent = SFT(0, "<pad>", model_name=str(folder / "model"), lora_config=lora, tokenizer=tokenizer)
    agent.save_checkpoint(tmp_path / "saved")
    trained = sum(p.numel() for p in agent.actor.parameters() if p.requires_grad)
    words = [*words, f"model.name={tmp_path / 'saved'}", "model.dtype=float32"]
    if kind == "full":
        words.append("lora.enabled=false")
    assert main(["plan", *words, "--tflops", "0.001", "--memory", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_mib"]["optimizer"] == pytest.approx(2 * 4 * trained / 2**20, abs=0.1)
    total = sum(p.numel() for p in agent.actor.parameters())
    assert found["parts_mib"]["weights"] == pytest.approx(4 * total / 2**20, abs=0.1)


def test_a_plan_of_a_vision_language_model_counts_its_tower(
    job: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = job
    model = tiny_vision_model("llava")
    model.resize_token_embeddings(len(load_tokenizer(str(folder / "model"))))
    model.save_pretrained(tmp_path / "vision")
    load_tokenizer(str(folder / "model")).save_pretrained(tmp_path / "vision")
    words = [*words, f"model.name={tmp_path / 'vision'}", "model.dtype=float32", "lora.target_scope=language_model"]
    assert main(["plan", *words, "--tflops", "0.001", "--memory", "4", "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["parts_mib"]["weights"]
    assert weights >= 4 * sum(p.numel() for p in model.parameters()) / 2**20 - 0.1


def test_a_plan_for_pictures_is_a_sentence(
    job: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line trains on text: a folder of pictures, or rows that name some, are refused as by `agilerl sft`."""
    _, words = job
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4), "red").save(tmp_path / "pictures" / "a.png")
    part = {"type": "image", "image": str(tmp_path / "pictures" / "a.png")}
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for place, says in (("pictures", "holds no data file"), ("rows.jsonl", "images")):
        assert main(["plan", *words, f"data.train={tmp_path / place}"]) == 2
        assert says in capsys.readouterr().err
