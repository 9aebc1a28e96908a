"""A checkpoint from a stranger is harmless: nothing in it runs, nothing in it leads out of its folder."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from agilerl.checkpoint import CheckpointContent, newest_complete, read_checkpoint, verify, write_checkpoint
from agilerl.checkpoint.files import hash_file
from agilerl.checkpoint.manifest import Manifest, read_manifest, write_manifest
from agilerl.errors import CheckpointError
from tests.checkpoint.helpers import lora_content, lora_model


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


def torch_file(path: Path, value: object) -> None:
    torch.save(value, path)


def old_torch_file(path: Path, value: object) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def pickle_file(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(value))


def rewrite_manifest(payload: Path) -> None:
    """What a stranger would do after changing a file."""
    manifest = read_manifest(payload)
    files = {name: hash_file(payload / name) for name in manifest.files}
    (payload / "manifest.json").unlink()
    write_manifest(payload, Manifest(files, manifest.links, manifest.info))


@pytest.mark.parametrize("save", [torch_file, old_torch_file, pickle_file])
@pytest.mark.parametrize("place", ["whole", "settings", "state.rng", "optimizer", "training"])
def test_payloads_do_not_run(tmp_path: Path, place: str, save) -> None:
    marker = tmp_path / "ran"
    write_checkpoint(CheckpointContent("SFT", optimizer={"state": {}}, training={"rng": 1}), tmp_path / "out")
    payload = tmp_path / "out" / ".versions" / "1"
    file = payload / ("training.pt" if place == "training" else "attributes.pt")
    value: object = torch.load(file, weights_only=True)
    if place == "whole":
        value = Payload(marker)
    elif place == "training":
        value = {"rng": Payload(marker)}
    elif place == "state.rng":
        value["state"]["rng"] = Payload(marker)  # type: ignore[index]
    else:
        value[place] = {"x": Payload(marker)}  # type: ignore[index]
    save(file, value)
    rewrite_manifest(payload)
    with pytest.raises(CheckpointError, match=r"was not loaded|damaged"):
        read_checkpoint(tmp_path / "out")
    assert not verify(tmp_path / "out").is_ok
    assert not marker.exists()


def test_torchscript_archives_do_not_run(tmp_path: Path) -> None:
    write_checkpoint(CheckpointContent("SFT"), tmp_path)
    file = tmp_path / ".versions" / "1" / "attributes.pt"
    file.unlink()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps(()))
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(tmp_path / "ran")))
        archive.writestr("archive/version", "3")
    rewrite_manifest(file.parent)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "actor/../../secret", "..", "a\\b"])
def test_manifest_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("mine")
    write_checkpoint(CheckpointContent("SFT"), tmp_path / "out")
    payload = tmp_path / "out" / ".versions" / "1"
    manifest = read_manifest(payload)
    manifest.files[name] = hash_file(tmp_path / "secret")
    (payload / "manifest.json").unlink()
    write_manifest(payload, manifest)
    with pytest.raises(CheckpointError, match="refused"):
        read_checkpoint(tmp_path / "out")
    assert newest_complete(tmp_path / "out") is None
    # A later save must not delete through such a manifest either.
    write_checkpoint(CheckpointContent("SFT"), tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "mine"


def test_links_cannot_leave_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "adapter_model.safetensors").write_text("x")
    write_checkpoint(lora_content(lora_model()[1]), tmp_path / "out")
    file = tmp_path / "out" / ".versions" / "1" / "actor" / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(secret / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        read_checkpoint(tmp_path / "out")
    current = tmp_path / "out" / ".versions" / "current"
    current.unlink()
    current.symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="not followed"):
        read_checkpoint(tmp_path / "out")


def test_remote_code_and_hub_kernels_are_not_asked_for_by_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"trust_remote_code": True, "attn_implementation": "someone/kernel", "dtype": "float32"}
    write_checkpoint(CheckpointContent("SFT", settings={"model_config": options}), tmp_path)
    assert read_checkpoint(tmp_path).settings["model_config"] == {"dtype": "float32"}
    assert "trust_remote_code" in caplog.text


def test_a_linked_checkpoint_folder_is_fine(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    assert read_checkpoint(tmp_path / "link").state["steps"] == 7
    assert verify(tmp_path / "link").is_ok
