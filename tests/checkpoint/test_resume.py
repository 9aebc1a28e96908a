"""Going on with a run in Python: exactly, with changed settings, from a damaged folder, after a signal."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms.sft import SFT
from agilerl.checkpoint import CheckpointFolder, read_checkpoint, verify
from agilerl.errors import CheckpointError, DataError, OutputError
from agilerl.training.llm import train_llm_dataset
from agilerl.training.llm.signals import Interrupted, Terminated
from tests.checkpoint.test_round_trip import same
from tests.helpers import tiny_tokenizer
from tests.training.agents import make_agent, make_env, make_population


def train(folder: Path, *, agent: SFT | None = None, env: Any = None, **arguments: Any) -> SFT:
    agent = agent or make_agent(dropout=0.3, micro_batch_size_per_gpu=2)
    quiet = {"verbose": False, "num_epochs": 2, "checkpoint_path": folder, "evaluation_interval": 2}
    (trained,), _ = train_llm_dataset([agent], env or make_env(train=20), **(quiet | arguments))
    return trained


def weights(agent: SFT) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in agent.actor.parameters() if parameter.requires_grad]


def test_five_and_five_steps_are_ten(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", max_steps=40, num_epochs=None)
    train(tmp_path / "parts", max_steps=28, num_epochs=None)
    resumed = train(tmp_path / "parts", max_steps=40, num_epochs=None, resume=True)
    assert same(weights(resumed), weights(straight))
    one, other = (read_checkpoint(tmp_path / name) for name in ("straight", "parts"))
    assert same(one.optimizer, other.optimizer)
    assert resumed.steps == 40


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    first = train(tmp_path)
    again = train(tmp_path, resume=True)
    assert same(weights(first), weights(again))
    assert again.fitness == first.fitness


def test_a_finished_run_that_is_resumed_into_another_folder_is_saved_there(tmp_path: Path) -> None:
    first = train(tmp_path / "a")
    again = train(tmp_path / "b", resume=tmp_path / "a")
    assert again.fitness == first.fitness
    assert same(
        read_checkpoint(tmp_path / "b").adapters["actor"].tensors,
        read_checkpoint(tmp_path / "a").adapters["actor"].tensors,
    )
    assert verify(tmp_path / "b").is_ok


@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_any_touch_of_the_disk_in_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Whatever the last save got done, the resumed run ends with its last state at the folder's root."""

    def run(folder: Path, **arguments: Any) -> None:
        pop = make_population(size, dropout=0.3, batch_size=4) if size > 1 else [make_agent(dropout=0.3, batch_size=4)]
        quiet = {"verbose": False, "num_epochs": 1, "checkpoint_path": folder, "evaluation_interval": None}
        train_llm_dataset(pop, make_env(train=8, test=4), **(quiet | arguments))

    run(tmp_path / "straight")
    wanted = read_checkpoint(tmp_path / "straight")
    run(tmp_path / "begun", max_steps=4, num_epochs=None)
    moments = 0
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "begun", folder, symlinks=True)
        with monkeypatch.context() as patch:
            countdown = _kill_at(patch, moment)
            try:
                run(folder, resume=True)
            except _Killed:
                moments += 1
        if countdown[0] > 0:
            break  # the save was over before
        run(folder, resume=True)
        found = read_checkpoint(folder)
        assert found.training is not None
        assert found.training["is_finished"], moment
        assert same(found.adapters["actor"].tensors, wanted.adapters["actor"].tensors), moment
        assert sorted(path.name for path in (folder / "history").iterdir()) == ["step-00000004", "step-00000008"], (
            moment
        )
        assert read_checkpoint(folder / "history" / "step-00000008").training["is_finished"]  # type: ignore[index]
        assert verify(folder).is_ok, moment
    assert moments > 15


class _Killed(BaseException):
    """Ends a run where SIGKILL would."""


def _kill_at(patch: pytest.MonkeyPatch, moment: int) -> list[int]:
    """End the run instead of the given touch of the disk, counted from 0; returns what is left of the count."""
    left = [moment]

    def ending(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise _Killed
            return real(*args, **kwargs)

        return call

    for owner, name in (
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "symlink_to"),
    ):
        patch.setattr(owner, name, ending(getattr(owner, name)))
    return left


def test_what_the_resuming_call_says_counts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, num_epochs=1, agent=make_agent(lr=1e-3, dropout=0.1))
    with caplog.at_level(logging.WARNING):
        agent = train(tmp_path, num_epochs=2, resume=True, agent=make_agent(lr=5e-3, dropout=0.2, weight_decay=0.1))
    assert agent.current_lr == 5e-3
    assert [group["lr"] for group in agent.optimizer.optimizer.param_groups] == [5e-3]
    told = caplog.text
    for change in ("lr 0.001 -> 0.005", "num_epochs 1 -> 2", "lora_config.lora_dropout 0.1 -> 0.2"):
        assert change in told, told
    assert "weight_decay 0.0 -> 0.1" in told
    assert "target_modules" not in told


def test_other_shapes_of_run_are_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(CheckpointError, match="a population of 1, this run has 2 agents"):
        train_llm_dataset(make_population(2), make_env(), checkpoint_path=tmp_path, verbose=False, resume=True)
    with pytest.raises(DataError, match="other training data"):
        train(tmp_path, env=make_env(train=21), resume=True)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        train(tmp_path, agent=_with_tokenizer(tiny_tokenizer(all_bytes=True)), resume=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(tmp_path / "new", resume=tmp_path / "none")


def _with_tokenizer(tokenizer: Any) -> SFT:
    agent = make_agent()
    agent.tokenizer = tokenizer
    return agent


def test_an_agents_checkpoint_is_no_run(tmp_path: Path) -> None:
    make_agent().save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no training run"):
        train(tmp_path, resume=True)


def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = train(tmp_path / "straight", checkpoint_steps=8)
    train(tmp_path / "parts", checkpoint_steps=8, keep_last=3)
    file = tmp_path / "parts" / "actor" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    resumed = train(tmp_path / "parts", checkpoint_steps=8, keep_last=3, resume=True)
    assert "adapter_model.safetensors" in caplog.text
    assert same(weights(resumed), weights(straight))
    assert verify(tmp_path / "parts").is_ok


def test_resuming_from_kept_history_and_into_another_folder(tmp_path: Path) -> None:
    straight = train(tmp_path / "a", checkpoint_steps=8, keep_last=9)
    oldest = sorted((tmp_path / "a" / "history").iterdir())[0]
    assert read_checkpoint(oldest).state["learn_calls"] < straight._state.learn_calls
    resumed = train(tmp_path / "b", checkpoint_steps=8, resume=oldest)
    assert same(weights(resumed), weights(straight))


@pytest.mark.parametrize("phase", ["learn", "test", "save"])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)])
def test_a_signal_in_any_phase_saves_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, number: signal.Signals, kind: type
) -> None:
    straight = train(tmp_path / "straight", checkpoint_steps=16)
    owner, name = {"learn": (SFT, "learn"), "test": (SFT, "test"), "save": (CheckpointFolder, "save")}[phase]
    real, calls = getattr(owner, name), []

    def signalled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 or phase == "save":
            os.kill(os.getpid(), number)
            monkeypatch.undo()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)
    with pytest.raises(kind) as caught:
        train(tmp_path / "parts", checkpoint_steps=16)
    assert caught.value.path == tmp_path / "parts"
    assert verify(tmp_path / "parts").is_ok
    if phase != "test":
        assert 0 < read_checkpoint(tmp_path / "parts").state["learn_calls"] < straight._state.learn_calls
    resumed = train(tmp_path / "parts", checkpoint_steps=16, resume=True)
    assert same(weights(resumed), weights(straight))


def test_a_failing_background_save_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OutputError("no space left")

    monkeypatch.setattr("agilerl.checkpoint.folder.store", full)
    with pytest.raises(OutputError, match="no space left"):
        train(tmp_path / "a", async_save=True, checkpoint_steps=8)
    agent = train(tmp_path / "b", async_save=True, checkpoint_steps=8, on_save_error="warn")
    assert agent.steps == 40


def test_a_fresh_run_says_that_it_replaces_an_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    train(tmp_path, num_epochs=1)
    assert "holds a checkpoint of SFT after 40 rows; the first save replaces it" in caplog.text
    assert read_checkpoint(tmp_path).training["iteration"] == 3  # type: ignore[index]
