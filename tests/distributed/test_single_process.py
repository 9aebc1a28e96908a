"""What needs no second process: checkpointing of blocks, offloading, ranks, loading by slices, the launcher's words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from agilerl.cli.launch import torchrun_arguments
from agilerl.distributed import (
    FSDPConfig,
    activation_offload,
    get_local_rank,
    get_rank,
    get_world_size,
    is_main_process,
    make_runtime,
    offload,
    set_gradient_checkpointing,
)
from agilerl.distributed.checkpointing import blocks_of
from agilerl.distributed.group import group_timeout
from agilerl.distributed.optimizer import keep_state_on_host
from agilerl.distributed.skeleton import build_skeleton, hollow_copy, key_in_files
from agilerl.errors import CheckpointError, ConfigError, UnsupportedError
from tests.helpers import tiny_model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.arange(3, 15)[None]
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_checkpointing_recomputes_blocks_and_keeps_gradients(family: str, lora: bool) -> None:
    model: nn.Module = tiny_model(family, dtype=torch.float64)
    if lora:
        targets = ["c_attn"] if family == "gpt2" else ["q_proj", "down_proj"]
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2")
        model = get_peft_model(model, config)
    expected = gradients(model)
    ran = []
    handles = [block.mlp.register_forward_pre_hook(lambda *_: ran.append(1)) for _, block in blocks_of(model)]
    assert set_gradient_checkpointing(model, True) == 2
    found = gradients(model)
    assert len(ran) == 4  # twice each
    for handle in handles:
        handle.remove()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_checkpointing_of_some_blocks() -> None:
    model = tiny_model("gemma3_text")  # one sliding, one full
    assert set_gradient_checkpointing(model, True, every_n_blocks=2) == 1
    assert set_gradient_checkpointing(model, True, skip_layer_types=("sliding_attention",)) == 1
    assert set_gradient_checkpointing(model, True, skip_layer_types=(type(blocks_of(model)[0][1]).__name__,)) == 0
    assert set_gradient_checkpointing(model, False) == 0
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_model_without_blocks_is_told() -> None:
    with pytest.warns(UserWarning, match="no blocks"):
        set_gradient_checkpointing(nn.Sequential(nn.Linear(2, 2)), True)


def test_activation_offload_says_once_that_a_cpu_gains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    offload._told.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with activation_offload(True, "cpu"):
                pass
    assert caplog.text.count("nothing to gain") == 1


def test_ranks_come_from_the_launcher_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (get_rank(), get_world_size(), get_local_rank(), is_main_process()) == (0, 1, 0, True)
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert (get_rank(), get_world_size(), get_local_rank(), is_main_process()) == (3, 4, 1, False)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf"])
def test_a_bad_time_out_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGILERL_GROUP_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match="AGILERL_GROUP_TIMEOUT_S"):
        group_timeout()


def test_quantised_models_are_not_sharded() -> None:
    from bitsandbytes.nn import Linear4bit

    model = nn.Sequential(Linear4bit(4, 4))
    runtime = make_runtime("cpu", FSDPConfig())
    with pytest.raises(UnsupportedError, match="quantised"):
        runtime.prepare(model, gradient_checkpointing=False)


def test_make_runtime_wants_an_fsdp_config() -> None:
    with pytest.raises(ConfigError, match="dict"):
        make_runtime("cpu", {"tp": 2})  # type: ignore[arg-type]


def test_a_skeleton_takes_no_memory_and_has_real_buffers(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    built = build_skeleton(tmp_path, None)
    assert built is not None
    model, files = built
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    assert files.shape("model.norm.weight") == (32,)


def test_files_that_do_not_match_the_parameters_give_no_skeleton(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norms.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert build_skeleton(tmp_path, None) is None
    (tmp_path / "model.safetensors").unlink()
    assert build_skeleton(tmp_path, None) is None


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    from agilerl.distributed.skeleton import WeightFiles
    from agilerl.errors import ModelError

    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(ModelError, match="outside its folder"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("base_model.model.lm_head.modules_to_save.actor.weight", "lm_head.weight"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
    ],
)
def test_keys_in_files(name: str, key: str) -> None:
    assert key_in_files(name) == key


def test_a_hollow_copy_keeps_ties_and_trainability() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    copy = hollow_copy(model)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in copy.parameters())
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in model.parameters()]


def test_optimizer_state_of_other_parameters_is_refused() -> None:
    runtime = make_runtime("cpu")
    one, other = nn.Linear(2, 2), nn.Linear(2, 3)
    first, second = (torch.optim.AdamW(model.parameters()) for model in (one, other))
    one(torch.ones(1, 2)).sum().backward()
    first.step()
    state = runtime.collect_optimizer(one, first)
    assert set(state["state"]) == {"weight", "bias"}
    with pytest.raises(CheckpointError, match="shape"):
        runtime.load_optimizer(other, second, state)
    alone = torch.optim.AdamW([other.weight])
    with pytest.raises(CheckpointError, match="other parameters"):
        runtime.load_optimizer(other, alone, state)


def test_moments_on_the_host_do_not_change_a_step() -> None:
    results = []
    for on_host in (False, True):
        model = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if on_host:
            keep_state_on_host(optimizer)
        for _ in range(3):
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(value.device.type == "cpu" for entry in optimizer.state.values() for value in entry.values())
        results.append(model.weight.detach())
    assert torch.equal(*results)


def test_words_of_the_launcher() -> None:
    one = torchrun_arguments(["sft", "run.yaml", "--output", "x"], 2)
    assert one[4:] == ["--nproc-per-node", "2", "-m", "agilerl", "sft", "run.yaml", "--output", "x"]
    many = torchrun_arguments(["sft"], 8, nodes=2, node_rank=1, master="host0:29500")
    assert many[:8] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "host0", "--master-port", "29500"]


@pytest.mark.parametrize(
    ("words", "procs", "rest", "message"),
    [
        ([], 2, {}, "needs a command"),
        (["launch"], 2, {}, "itself"),
        (["sft"], 0, {}, "at least 1"),
        (["sft"], 2, {"nodes": 2}, "--master"),
        (["sft"], 2, {"node_rank": 1}, "below --nodes"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(words: list[str], procs: int, rest: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchrun_arguments(words, procs, **rest)
