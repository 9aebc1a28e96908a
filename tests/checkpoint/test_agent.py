"""Checkpoints through the agent: rebuilt from the folder alone, strict about what differs, harmless, tied, offline."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agilerl.algorithms.sft import SFT
from agilerl.checkpoint import verify, write_checkpoint
from agilerl.errors import CheckpointError
from tests.helpers import tiny_model, tiny_tokenizer

IDS = torch.arange(3, 11)[None]
BATCH = {"input_ids": torch.arange(3, 19).view(2, 8), "attention_mask": torch.ones(2, 8), "prompt_lengths": [3, 3]}


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1} | changes))


def make(base: Path, config: LoraConfig | None = None, **settings: Any) -> SFT:
    return SFT(0, "<pad>", model_name=str(base), lora_config=config, batch_size=2, lr=1e-2, seed=1, **settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SFT]:
    agent = make(base, lora(), tokenizer=tiny_tokenizer())
    agent.learn(BATCH)
    folder = tmp_path_factory.mktemp("saved") / "out"
    agent.save_checkpoint(folder)
    return folder, agent


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_an_agent_is_rebuilt_from_the_folder_alone_and_goes_on_alike(saved: tuple[Path, SFT], tmp_path: Path) -> None:
    folder, agent = saved
    agent = agent.clone()
    loaded = SFT.load(folder)
    assert torch.equal(logits(loaded.actor), logits(agent.actor))
    assert loaded.tokenizer is not None
    for one in (agent, loaded):
        one.learn(BATCH)
    assert torch.equal(logits(loaded.actor), logits(agent.actor))
    loaded.save_checkpoint(tmp_path / "again")
    assert verify(tmp_path / "again").base.endswith("matches")


def test_peft_needs_the_folder_and_the_base_only(saved: tuple[Path, SFT], base: Path) -> None:
    folder, agent = saved
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    assert torch.allclose(logits(model), logits(agent.actor), atol=1e-6)


def test_saving_and_loading_need_no_network(saved: tuple[Path, SFT], tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    saved[1].save_checkpoint(tmp_path / "out")
    SFT.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"r": 8}, "r is 4 there and 8 here"),
        ({"lora_alpha": 32}, "lora_alpha is 8 there and 32 here"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"use_rslora": True}, "use_rslora"),
    ],
)
def test_other_lora_settings_are_named(saved: tuple[Path, SFT], base: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        make(base, lora(**changes)).load_checkpoint(saved[0])


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.4}, {"task_type": "CAUSAL_LM"}])
def test_differences_that_do_not_matter_load(saved: tuple[Path, SFT], base: Path, changes: dict[str, Any]) -> None:
    agent = make(base, lora(**changes))
    agent.load_checkpoint(saved[0])
    assert torch.equal(logits(agent.actor), logits(saved[1].actor))


def test_another_base_model_is_refused(saved: tuple[Path, SFT], tmp_path: Path) -> None:
    tiny_model("llama", seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="another base model"):
        make(tmp_path / "other", lora()).load_checkpoint(saved[0])


def test_a_base_model_that_was_moved_is_given_by_name(tmp_path: Path) -> None:
    for name, seed in (("base", 0), ("other", 9)):
        tiny_model("llama", seed=seed).save_pretrained(tmp_path / name)
    agent = make(tmp_path / "base", lora())
    agent.save_checkpoint(tmp_path / "out")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="say where it is with model_name"):
        SFT.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="another base model"):
        SFT.load(tmp_path / "out", model_name=str(tmp_path / "other"))
    loaded = SFT.load(tmp_path / "out", model_name=str(tmp_path / "moved"))
    assert torch.equal(logits(loaded.actor), logits(agent.actor))


@pytest.mark.parametrize("harm", ["rename", "drop", "reshape"])
def test_tensors_must_be_the_same(base: Path, tmp_path: Path, harm: str) -> None:
    agent = make(base, lora())
    agent.save_checkpoint(tmp_path)
    file = tmp_path / "actor" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    value = tensors.pop(name)
    if harm == "rename":
        tensors[name.replace("lora_A", "lora_Z")] = value
    elif harm == "reshape":
        tensors[name] = value[:2].contiguous()
    save_file(tensors, file)
    (tmp_path / "manifest.json").resolve().unlink()  # as somebody would who edits files by hand
    before = logits(agent.actor)
    with pytest.raises(CheckpointError, match=name.split(".")[-3]):
        agent.load_checkpoint(tmp_path)
    assert torch.equal(logits(agent.actor), before)


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_tied_full_fine_tune_stays_tied(tmp_path: Path, lora_only: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    agent = make(tmp_path / "base")
    agent.learn(BATCH)
    agent.save_checkpoint(tmp_path / "out", lora_only=lora_only)
    loaded = SFT.load(tmp_path / "out")
    for one in (agent, loaded):
        assert one.actor.lm_head.weight is one.actor.get_input_embeddings().weight
        one.learn(BATCH)
    assert torch.equal(logits(loaded.actor), logits(agent.actor))
    assert verify(tmp_path / "out").is_ok
    if lora_only:
        assert "lm_head.weight" not in load_file(tmp_path / "out" / "actor" / "model.safetensors")
    else:
        assert not (tmp_path / "out" / "actor").exists()
        state = torch.load(tmp_path / "out" / "attributes.pt", weights_only=True)["model_state"]
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_code_beside_the_base_model_does_not_run(saved: tuple[Path, SFT], base: Path, tmp_path: Path) -> None:
    """A stranger's checkpoint may name a folder whose config maps to a Python file."""
    marker = tmp_path / "ran"
    folder = tmp_path / "remote"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "stranger"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    agent = make(base, lora())
    content = agent._capture()
    content.settings |= {"model_name": str(folder), "model_config": {"trust_remote_code": True}}
    write_checkpoint(content, tmp_path / "out")
    with pytest.raises(ValueError, match="remote"):
        SFT.load(tmp_path / "out")
    assert verify(tmp_path / "out").base.startswith("not checked")
    assert not marker.exists()
