from __future__ import annotations

import pytest

from agilerl.config import load_config
from agilerl.errors import ConfigError, OutputError
from agilerl.recipes.describe import describe, find_config
from agilerl.recipes.folder import prepare_output, write_aside


def test_a_file_and_settings_may_come_in_any_order(tmp_path):
    (tmp_path / "a.yaml").write_text("sft:\n  lr: 1e-3\ndata:\n  train: x.jsonl\n")
    config = describe(["sft.batch_size=2", str(tmp_path / "a.yaml"), "sft.lr=2e-3"]).loaded.config
    assert (config.sft.lr, config.sft.batch_size) == (2e-3, 2)


def test_two_files_are_refused():
    with pytest.raises(ConfigError, match="Give one run description, not 2"):
        describe(["a.yaml", "b.yaml"])


def test_without_data_it_is_the_demonstration_and_with_data_it_is_not():
    demo = describe(["sft.batch_size=2"]).loaded
    assert demo.source("training.epochs") == "demonstration"
    assert demo.config.sft.batch_size == 2
    own = describe([], options={"data.train": "x.jsonl"}).loaded
    assert own.source("training.epochs") == "default"


def test_resuming_starts_from_the_saved_settings_and_lists_changes(tmp_path):
    folder = tmp_path / "moved"
    (folder / "history" / "step-1").mkdir(parents=True)
    saved = load_config(None, ["sft.lr=1e-3", "data.train=x.jsonl", "output.path=elsewhere"])
    (folder / "run.yaml").write_text(saved.to_yaml())
    for checkpoint in (folder, folder / "history" / "step-1"):
        description = describe(["sft.lr=5e-3"], resume=checkpoint)
        assert description.resume == checkpoint
        assert description.changes == (("sft.lr", "0.001", "0.005"),)
        assert description.loaded.config.output.path == str(folder)
        assert description.loaded.source("data.train") == "checkpoint"
    assert find_config(tmp_path) is None


def test_resuming_a_run_of_epochs_by_rows_needs_no_unsetting(tmp_path):
    (tmp_path / "run.yaml").write_text(load_config(None, ["training.epochs=2"]).to_yaml())
    config = describe(["training.max_steps=64"], resume=tmp_path).loaded.config
    assert (config.training.epochs, config.training.max_steps) == (None, 64)


def test_output_folders_are_checked_before_anything_else(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError):
        prepare_output(tmp_path / "file")
    with pytest.raises(OutputError):
        prepare_output(tmp_path / "file" / "below")
    assert prepare_output(tmp_path / "new" / "folder").is_dir()


def test_text_is_written_whole_or_not_at_all(tmp_path):
    write_aside(tmp_path / "a", "one")
    write_aside(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_aside(tmp_path / "missing" / "a", "x")
