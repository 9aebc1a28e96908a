"""What is written is what is read, by us, by PEFT and by transformers."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.checkpoint import CheckpointContent, FullModel, LLMCheckpointSnapshot, read_checkpoint, write_checkpoint
from agilerl.errors import CheckpointError
from tests.checkpoint.helpers import lora_content, lora_model
from tests.helpers import tiny_model

IDS = torch.arange(3, 11)[None]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("below", ["", "actor"])
def test_peft_loads_the_folder_and_the_adapter_folder(tmp_path: Path, below: str) -> None:
    base, peft = lora_model()
    write_checkpoint(lora_content(peft), tmp_path / "out")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out" / below))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, peft.eval()(IDS).logits)


def test_everything_comes_back(tmp_path: Path) -> None:
    content = lora_content(
        lora_model()[1], training={"cursor": {"epoch": 1, "position": 5}, "rng": torch.get_rng_state()}
    )
    write_checkpoint(content, tmp_path)
    back = read_checkpoint(tmp_path)
    for name in ("algorithm", "settings", "state", "optimizer", "base", "training"):
        assert same(getattr(back, name), getattr(content, name)), name
    assert same(back.adapters["actor"].tensors, content.adapters["actor"].tensors)
    assert back.adapters["actor"].config["r"] == 4
    assert back.adapters["actor"].config["base_model_name_or_path"] == "some/base"
    assert back.adapters["actor"].config["inference_mode"] is True
    assert read_checkpoint(tmp_path, need_optimizer=False).optimizer is None


def test_attributes_are_plain_for_anyone(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path)
    attributes = torch.load(tmp_path / "attributes.pt", weights_only=True)
    assert attributes["algorithm"] == "SFT"
    assert attributes["state"]["steps"] == 7


def test_tokenizer_and_chat_template_are_saved(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    ours = read_checkpoint(tmp_path).tokenizer
    assert ours is not None
    assert ours("hello there")["input_ids"] == tokenizer("hello there")["input_ids"]


def test_no_network_in_save_or_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    content = lora_content(lora_model()[1])
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_checkpoint(content, tmp_path)
    assert read_checkpoint(tmp_path).tokenizer is not None


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_full_model_is_an_ordinary_model_folder(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, seed=1).eval()
    full = FullModel.of(model, model.state_dict())
    write_checkpoint(CheckpointContent("SFT", full_model=full), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    back = read_checkpoint(tmp_path).full_model
    assert back is not None
    assert back.config["architectures"] == [type(model).__name__]


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=1, tie_word_embeddings=True)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    snapshot = LLMCheckpointSnapshot.of(
        CheckpointContent("SFT", full_model=FullModel.of(model, state), model_state=state)
    )
    snapshot.write(tmp_path)
    back = read_checkpoint(tmp_path)
    assert back.full_model is not None
    assert "lm_head.weight" not in back.full_model.tensors
    assert back.model_state is not None
    assert back.model_state["lm_head.weight"].data_ptr() == back.model_state["model.embed_tokens.weight"].data_ptr()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()


def test_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    big = torch.zeros(1 << 20)
    write_checkpoint(CheckpointContent("SFT", state={"row": big[5:9]}), tmp_path)
    assert (tmp_path / "attributes.pt").stat().st_size < 10_000


def test_copies_load_whether_links_are_kept_or_resolved(tmp_path: Path) -> None:
    peft = lora_model()[1]
    write_checkpoint(lora_content(peft), tmp_path / "a")
    for links in (False, True):
        copy = tmp_path / f"copy{links}"
        shutil.copytree(tmp_path / "a", copy, symlinks=links)
        assert read_checkpoint(copy).state["steps"] == 7
        PeftModel.from_pretrained(tiny_model("llama", seed=0), str(copy))


def test_a_second_save_replaces_the_first_and_leaves_other_files_alone(tmp_path: Path) -> None:
    content = lora_content(lora_model()[1])
    (tmp_path / "notes.txt").write_text("mine")
    write_checkpoint(content, tmp_path)
    content.state["steps"] = 8
    content.adapters, content.model_state = {}, {"w": torch.ones(2)}
    write_checkpoint(content, tmp_path)
    assert read_checkpoint(tmp_path).state["steps"] == 8
    assert not (tmp_path / "actor").is_symlink()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / ".versions").iterdir() if p.is_dir() and not p.is_symlink()] == ["2"]


def test_members_of_a_population_are_checkpoints_too(tmp_path: Path) -> None:
    contents = [lora_content(lora_model(seed)[1], state={"index": seed}) for seed in range(3)]
    LLMCheckpointSnapshot.of(contents[1], members=contents).write(tmp_path)
    for k in range(3):
        assert read_checkpoint(tmp_path / "population" / str(k)).state["index"] == k
    assert read_checkpoint(tmp_path).state["index"] == 1


def test_training_does_not_change_a_snapshot(tmp_path: Path) -> None:
    _, peft = lora_model()
    snapshot = LLMCheckpointSnapshot.of(lora_content(peft))
    before = {name: tensor.clone() for name, tensor in peft.state_dict().items() if "lora_" in name}
    for parameter in peft.parameters():
        parameter.data.zero_()
    snapshot.write(tmp_path)
    for name, tensor in read_checkpoint(tmp_path).adapters["actor"].tensors.items():
        assert torch.equal(tensor, before[name.replace(".weight", ".actor.weight")])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "none", "does not exist"),
        (lambda p: p / "out" / "attributes.pt", "it is a file"),
        (lambda p: p / "out" / "actor", "one adapter of the checkpoint"),
        (lambda p: p, r"checkpoints lie below it \(out\)"),
    ],
)
def test_the_wrong_path_gets_a_sentence(tmp_path: Path, make, says: str) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path / "out")
    with pytest.raises(CheckpointError, match=says):
        read_checkpoint(make(tmp_path))
