"""A run's folder: the newest at the root, a limited history, nothing foreign touched, one clear error when it is full."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from agilerl.checkpoint import (
    BackgroundWriter,
    CheckpointContent,
    CheckpointFolder,
    HostBuffers,
    LLMCheckpointSnapshot,
    check_writable,
    existing_checkpoint,
    files,
    newest_complete,
    read_checkpoint,
    verify,
    write_checkpoint,
)
from agilerl.checkpoint import write as write_module
from agilerl.errors import ConfigError, OutputError
from tests.checkpoint.helpers import files_of, lora_content, lora_model


def content(step: int, size: int = 10) -> CheckpointContent:
    return CheckpointContent("SFT", state={"steps": step}, model_state={"w": torch.full((size,), float(step))})


def steps(path: Path) -> list[int]:
    """Steps of the history, oldest first."""
    return [read_checkpoint(link).state["steps"] for link in sorted((path / "history").iterdir())]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2, keep_best=1)
    for step, score in enumerate([-3.0, -1.0, -2.0, None, -4.0], start=1):
        folder.save(content(step), step=step, score=score)
        assert read_checkpoint(tmp_path).state["steps"] == step
    assert steps(tmp_path) == [2, 4, 5]
    assert read_checkpoint(tmp_path / "best").state["steps"] == 2
    assert len(list((tmp_path / ".versions").glob("[0-9]*"))) == 3
    assert verify(tmp_path / "best").is_ok


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=3, keep_best=0)
    folder.save(content(1), step=8)
    folder.save(content(2), step=8, score=-1.0)
    assert steps(tmp_path) == [2]
    assert not (tmp_path / "best").is_symlink()


def test_keep_last_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    for step in (1, 2, 3):
        folder.save(content(step), step=step)
    assert steps(tmp_path) == [3]
    assert read_checkpoint(tmp_path).state["steps"] == 3


@pytest.mark.parametrize(("last", "best"), [(0, 1), (1, -1)])
def test_counts_are_checked(tmp_path: Path, last: int, best: int) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointFolder(tmp_path, last, best)


def test_foreign_files_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    folder.save(content(1), step=1)
    mine = [tmp_path / "notes.txt", tmp_path / ".versions" / "1" / "notes.txt", tmp_path / "history" / "notes.txt"]
    for path in mine:
        path.write_text("mine")
    for step in (2, 3):
        folder.save(content(step), step=step)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert files_of(tmp_path / ".versions" / "1") == ["notes.txt"]
    assert newest_complete(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["attributes.pt", "actor", "best", "history"])
def test_something_foreign_in_the_way_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=name):
        CheckpointFolder(tmp_path).save(lora_content(lora_model()[1]), step=1, score=1.0)
    assert (tmp_path / name).read_text() == "mine"


def test_a_fresh_run_replaces_an_earlier_one_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    first = CheckpointFolder(tmp_path, keep_last=2, keep_best=1)
    first.save(content(1), step=1, score=5.0)
    first.save(content(2), step=2, score=1.0)
    resumed = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    resumed.continue_run()
    resumed.save(content(3), step=3, score=2.0)
    assert steps(tmp_path) == [1, 3]
    assert existing_checkpoint(tmp_path) == "a checkpoint of SFT after 3 rows"
    CheckpointFolder(tmp_path, keep_last=2, keep_best=1).save(content(1), step=1, score=-9.0)
    assert steps(tmp_path) == [1]
    assert read_checkpoint(tmp_path / "best").model_state["w"][0] == 1  # type: ignore[index]


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert existing_checkpoint(tmp_path) is None
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "none") is None


def test_saving_into_a_copy_whose_links_were_resolved(tmp_path: Path) -> None:
    write_checkpoint(lora_content(lora_model()[1]), tmp_path / "a")
    subprocess.run(["cp", "-rL", str(tmp_path / "a"), str(tmp_path / "b")], check=True)
    assert not (tmp_path / "b" / "actor").is_symlink()
    assert verify(tmp_path / "b").is_ok
    second = lora_content(lora_model(1)[1], state={"steps": 9})
    write_checkpoint(second, tmp_path / "b")
    back = read_checkpoint(tmp_path / "b")
    assert back.state["steps"] == 9
    for name, tensor in second.adapters["actor"].tensors.items():
        assert torch.equal(back.adapters["actor"].tensors[name], tensor)
    assert (tmp_path / "b" / "actor").is_symlink()
    assert verify(tmp_path / "b").is_ok


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    write_checkpoint(content(1), tmp_path)
    (tmp_path / ".versions" / ".writing-2").mkdir()
    (tmp_path / ".versions" / ".writing-2" / "attributes.pt").write_bytes(b"half")
    assert read_checkpoint(tmp_path).state["steps"] == 1
    write_checkpoint(content(2), tmp_path)
    assert not list((tmp_path / ".versions").glob(".writing*"))


def test_a_kill_between_rename_and_link_is_seen_as_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.save(content(1), step=1)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(write_module.layout, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.save(content(2), step=2)
    assert read_checkpoint(tmp_path).state["steps"] == 1
    newest = newest_complete(tmp_path)
    assert newest is not None
    assert read_checkpoint(newest).state["steps"] == 2
    folder.save(content(3), step=3)
    assert steps(tmp_path) == [2, 3]


def test_at_every_step_of_a_save_a_whole_checkpoint_is_at_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at the folder whenever the writer touches the disk."""
    write_checkpoint(lora_content(lora_model()[1], state={"steps": 1}), tmp_path)
    seen: list[int] = []
    real = os.fsync

    def look(handle: int) -> None:
        real(handle)
        assert not any("model.safetensors" in p.file for p in verify(tmp_path).problems)
        seen.append(read_checkpoint(tmp_path).state["steps"])

    monkeypatch.setattr(files.os, "fsync", look)
    write_checkpoint(lora_content(lora_model(1)[1], state={"steps": 2}), tmp_path)
    assert seen == sorted(seen)
    assert {1, 2} == set(seen)


@contextmanager
def small_disk(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("kind", ["tensors", "state", "background"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        folder = CheckpointFolder(disk / "out")
        folder.save(content(1), step=1)
        big = content(2, size=1 << 20)
        if kind == "tensors":
            peft = lora_model()[1]
            big = lora_content(peft)
            big.adapters["actor"].tensors["x"] = torch.ones(1 << 20)
        writer = BackgroundWriter()
        if kind == "background":
            writer.submit(LLMCheckpointSnapshot.of(big), folder, step=2)
        save = writer.close if kind == "background" else lambda: folder.save(big, step=2)
        with pytest.raises(OutputError, match=r"no space left .* checkpoint that was there is unharmed") as caught:
            save()
        assert caught.value.errno == errno.ENOSPC
        assert verify(disk / "out").is_ok
        assert read_checkpoint(disk / "out").state["steps"] == 1
        folder.save(content(3), step=3)
        assert read_checkpoint(disk / "out").state["steps"] == 3


def test_training_may_go_on_when_a_save_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        folder = CheckpointFolder(disk / "out", on_error="warn")
        assert folder.save(content(1, size=1 << 20), step=1) is None
        assert "Training goes on" in caplog.text
        assert folder.save(content(2), step=2) == disk / "out"


def test_folders_that_cannot_be_written_are_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="Nothing was trained yet"):
        CheckpointFolder(tmp_path / "file" / "out")
    with small_disk(tmp_path / "disk", "ro") as disk, pytest.raises(OutputError, match="make the folder writable"):
        check_writable(disk / "out")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "training.pt", "adapter_config.json"])
def test_files_in_the_way_of_a_checkpoint_are_told_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=f"{name} is in the way"):
        CheckpointFolder(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_two_writers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        write_module.writer_lock(tmp_path),
        pytest.raises(OutputError, match="Another process"),
        write_module.writer_lock(tmp_path),
    ):
        pass


def test_the_background_writer_writes_what_was_snapped(tmp_path: Path) -> None:
    folder, writer, buffers = CheckpointFolder(tmp_path), BackgroundWriter(), HostBuffers()
    weights = torch.zeros(1000)
    pointers = []
    for step in (1, 2, 3):
        weights.fill_(step)
        writer.wait()
        snapshot = LLMCheckpointSnapshot.of(CheckpointContent("SFT", model_state={"w": weights}), buffers)
        pointers.append(snapshot.content.model_state["w"].data_ptr())  # type: ignore[union-attr,index]
        writer.submit(snapshot, folder, step=step)
        weights.fill_(-1)
    writer.close()
    assert len(set(pointers)) == 1
    assert read_checkpoint(tmp_path).model_state["w"].eq(3).all()  # type: ignore[index]


def test_errors_in_the_background_reach_the_next_call_once(tmp_path: Path) -> None:
    folder, writer = CheckpointFolder(tmp_path), BackgroundWriter()
    bad = LLMCheckpointSnapshot(CheckpointContent("SFT", settings={"x": object()}))
    writer.submit(bad, folder, step=1)
    with pytest.raises(ValueError, match=r"settings.x is a builtins.object"):
        writer.submit(LLMCheckpointSnapshot.of(content(2)), folder, step=2)
    writer.submit(LLMCheckpointSnapshot.of(content(3)), folder, step=3)
    writer.close()
    assert read_checkpoint(tmp_path).state["steps"] == 3


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, writer = CheckpointFolder(tmp_path, keep_last=5), BackgroundWriter()
    go = threading.Event()
    real = CheckpointFolder.save
    order: list[int] = []

    def slow(self: CheckpointFolder, snapshot: LLMCheckpointSnapshot, *, step: int, score: float | None) -> object:
        assert go.wait(10)
        order.append(step)
        return real(self, snapshot, step=step, score=score)

    monkeypatch.setattr(CheckpointFolder, "save", slow)
    writer.submit(LLMCheckpointSnapshot.of(content(1)), folder, step=1)
    assert writer.is_busy
    threading.Timer(0.05, go.set).start()
    writer.submit(LLMCheckpointSnapshot.of(content(2)), folder, step=2)
    assert order[0] == 1
    writer.close()
    assert order == [1, 2]
