"""Whatever happens to a file of a checkpoint, verify names it and resuming takes the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agilerl.checkpoint import (
    CheckpointContent,
    CheckpointFolder,
    FullModel,
    base_fingerprint,
    newest_complete,
    read_checkpoint,
    verify,
    write_checkpoint,
)
from agilerl.cli import main
from agilerl.errors import CheckpointError
from tests.checkpoint.helpers import files_of, lora_content, lora_model
from tests.helpers import tiny_model


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    path.unlink()


def two_checkpoints(path: Path) -> list[str]:
    """A run's folder with a history of two; returns the file names of a payload."""
    content = lora_content(lora_model()[1], training={"iteration": 1})
    folder = CheckpointFolder(path, keep_last=2)
    folder.save(content, members=[content], step=10)
    content.state["steps"] = 8
    folder.save(content, members=[content], step=20)
    payload = path / ".versions" / "2"
    return [name for name in files_of(payload) if not (payload / name).is_symlink()]


def test_a_good_checkpoint_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = two_checkpoints(tmp_path)
    assert {"manifest.json", "attributes.pt", "training.pt", "actor/adapter_model.safetensors"} <= set(names)
    report = verify(tmp_path)
    assert report.is_ok, report.problems
    assert report.base.startswith("not checked: the base model some/base is not on this machine")
    assert newest_complete(tmp_path) == tmp_path
    assert verify(tmp_path / "history" / "step-00000010").is_ok
    assert main(["verify", str(tmp_path)]) == 0
    assert "good checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("harm", [cut, empty, flip, remove])
def test_every_harmed_file_is_named_and_the_one_before_is_used(
    tmp_path: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in two_checkpoints(tmp_path):
        path = tmp_path / ".versions" / "2" / name
        data = path.read_bytes()
        harm(path)
        assert name in {problem.file for problem in verify(tmp_path).problems}
        older = newest_complete(tmp_path)
        assert older == tmp_path / ".versions" / "1", name
        assert read_checkpoint(older).state["steps"] == 7
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert verify(tmp_path).is_ok
    harm(tmp_path / "attributes.pt")
    assert main(["verify", str(tmp_path)]) == 1
    assert "attributes.pt" in capsys.readouterr().out


def test_a_cut_adapter_is_told_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_checkpoints(tmp_path)
    cut(tmp_path / "actor" / "adapter_model.safetensors")
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "WRONG  actor/adapter_model.safetensors: is cut off: it has" in said.out
    assert "base model: not checked: the adapter is damaged" in said.out
    assert "1 thing is wrong" in said.err
    assert f"An earlier one in it is whole, use that: {tmp_path / '.versions' / '1'}" in said.err
    write_checkpoint(lora_content(lora_model()[1]), tmp_path / "single")
    flip(tmp_path / "single" / "actor" / "adapter_model.safetensors")
    assert main(["verify", str(tmp_path / "single")]) == 1
    assert "Copy these files again, or save it again." in capsys.readouterr().err


def test_any_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    write_checkpoint(CheckpointContent("SFT"), tmp_path)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for i in range(len(whole)):
        data = bytearray(whole)
        data[i] ^= 1
        path.write_bytes(bytes(data))
        assert not verify(tmp_path).is_ok, (i, whole[max(0, i - 10) : i + 10])


def test_a_cut_file_is_caught_when_loading_too(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path)
    cut(tmp_path / "actor" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors has \d+ bytes instead of"):
        read_checkpoint(tmp_path)


def test_a_missing_link_at_the_root_is_named(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path)
    (tmp_path / "actor").unlink()
    assert [problem.file for problem in verify(tmp_path).problems] == ["actor"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    content = lora_content(lora_model()[1])
    name = next(iter(content.adapters["actor"].tensors))
    content.adapters["actor"].tensors[name][0, 0] = bad
    write_checkpoint(content, tmp_path)
    problems = verify(tmp_path).problems
    assert len(problems) == 1
    assert name in str(problems[0])


def test_moments_and_ranks_must_fit(tmp_path: Path) -> None:
    content = lora_content(lora_model()[1])
    tensors = content.adapters["actor"].tensors
    name = next(key for key in tensors if "lora_A" in key)
    assert content.optimizer is not None
    moments = content.optimizer["state"].pop(name)
    content.optimizer["state"][name.replace(".weight", ".actor.weight")] = moments | {"exp_avg": torch.ones(2, 2)}
    tensors[name] = torch.ones(3, tensors[name].shape[1])
    write_checkpoint(content, tmp_path)
    text = "\n".join(map(str, verify(tmp_path).problems))
    assert "has rank 3, its lora_B 4" in text
    assert "exp_avg" in text


def test_a_full_model_must_fit_its_config(tmp_path: Path) -> None:
    model = tiny_model("llama")
    full = FullModel.of(model, model.state_dict())
    write_checkpoint(CheckpointContent("SFT", full_model=full), tmp_path)
    report = verify(tmp_path)
    assert report.is_ok, report.problems
    assert report.base.startswith("not needed")
    full.tensors["model.norm.weight"] = torch.ones(5)
    write_checkpoint(CheckpointContent("SFT", full_model=full), tmp_path)
    assert "model.norm.weight has shape (5,)" in str(verify(tmp_path).problems[0])


def test_the_base_model_is_compared_where_it_is_found(tmp_path: Path) -> None:
    base, peft = lora_model()
    base.save_pretrained(tmp_path / "base")
    tiny_model("llama", seed=5).save_pretrained(tmp_path / "other")
    identity = {"name_or_path": str(tmp_path / "base"), "fingerprint": base_fingerprint(peft)}
    write_checkpoint(lora_content(peft, base=identity), tmp_path / "out")
    report = verify(tmp_path / "out")
    assert report.is_ok, report.problems
    assert report.base.endswith("matches")
    wrong = verify(tmp_path / "out", base_model=str(tmp_path / "other"))
    assert [problem.file for problem in wrong.problems] == ["base model"]
    (tmp_path / "base").rename(tmp_path / "moved")
    assert verify(tmp_path / "out").base.startswith("not checked")
    assert verify(tmp_path / "out", base_model=str(tmp_path / "moved")).base.endswith("matches")
    assert main(["verify", str(tmp_path / "out"), "--base", str(tmp_path / "other")]) == 1


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder is empty"):
        verify(tmp_path)
    assert main(["verify", str(tmp_path)]) == 2


def test_manifest_is_strict_json(tmp_path: Path) -> None:
    write_checkpoint(CheckpointContent("SFT"), tmp_path, info={"score": float("nan"), "lr": torch.tensor(0.5)})

    def refuse(text: str) -> None:
        raise ValueError(text)

    info = json.loads((tmp_path / "manifest.json").read_text(), parse_constant=refuse)["info"]
    assert info["score"] is None
    assert info["lr"] == 0.5
