from __future__ import annotations

import csv
import json
import logging
import shutil

import pytest

from tests.cli.conftest import WORDS

NUMBERS = ("preference loss", "reward margin")


@pytest.fixture
def pairs(tmp_path):
    """Training and held-out pairs as files."""

    def write(name, words):
        path = tmp_path / name
        records = [{"id": 7, "prompt": word, "chosen": word[::-1], "rejected": word} for word in words]
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write("pairs.jsonl", WORDS), write("pairs-test.jsonl", [f"{word}!" for word in WORDS[:4]])


@pytest.fixture
def dpo(agilerl, pairs):
    """``agilerl dpo`` on the pairs; further words are added."""
    train, test = pairs
    quiet = ("log.console=off", "evaluation.max_new_tokens=4")
    return lambda *words: agilerl("dpo", "--data", train, "--test-data", test, *quiet, *words)


@pytest.fixture
def tuned(sft, tmp_path):
    """What a short `agilerl sft` leaves behind."""
    code, _, err = sft("sft.lr=1e-2", "evaluation.enabled=no", "log.console=off")
    assert code == 0, err
    return tmp_path / "out"


def test_from_a_run_of_sft_to_preferences_and_on(dpo, agilerl, tuned, tmp_path, caplog):
    folder = tmp_path / "aligned"
    code, out, err = dpo("--model", tuned, "--output", folder, "dpo.lr=1e-2", "dpo.batch_size=4", "training.epochs=4")
    assert code == 0, err
    assert "before   held-out margin +0.000" in out
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    before, after = (next(line[2:] for line in lines if line[:2] == name.split()) for name in NUMBERS)
    assert before[0] == "0.6931"
    assert float(before[1]) < float(before[0])
    assert float(after[1]) > 0
    assert "id" in err + out  # the column that nothing uses is named
    with (folder / "logs" / "metrics.csv").open(newline="") as file:
        rows = [row["rows"] for row in csv.DictReader(file) if row["kind"] == "train"]
    assert rows == [str(4 * number) for number in range(1, 9)]
    code, out, err = dpo("--resume", folder, "training.epochs=5")
    assert code == 0, err
    assert "Resumed with changed settings: run num_epochs 4 -> 5" in caplog.text
    assert agilerl("chat", folder, "--message", "abc", "--max-new-tokens", "2")[0] == 0


def test_a_run_of_another_command_is_not_resumed(dpo, tuned):
    code, _, err = dpo("--resume", tuned)
    assert code == 2
    assert f"{tuned} is a run of `agilerl sft`, which `agilerl dpo` cannot go on with." in err
    assert f"agilerl dpo --model {tuned}" in err


def test_an_adapter_folder_points_to_its_run(dpo, sft, tuned, tmp_path):
    for command in (dpo, sft):
        code, _, err = command("--model", tuned / "actor", "--output", tmp_path / "other")
        assert code == 2
        assert f"holds an adapter alone, not a model; name the run that it belongs to: {tuned}" in err
    lone = tmp_path / "lone"
    shutil.copytree(tuned / "actor", lone)
    code, _, err = dpo("--model", lone, "--output", tmp_path / "other")
    assert code == 2
    assert f"model.adapter={lone}" in err


def test_a_base_model_that_moved_can_be_named(sft, dpo, model_folder, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(model_folder, old)
    assert sft("evaluation.enabled=no", model=old)[0] == 0
    out = tmp_path / "out"
    old.rename(new)
    code, _, err = sft("--resume", out, "training.epochs=2", model=old)
    assert code == 2
    assert "does not exist. If it was moved, say where it is now: model.name=NEW" in err
    code, _, err = dpo("--model", out, "--output", tmp_path / "aligned")
    assert code == 2
    assert f"It is the base model of {out}. If it was moved" in err
    assert f"model.name=NEW model.adapter={out}" in err
    code, _, err = dpo(f"model.name={new}", f"model.adapter={out}", "--output", tmp_path / "aligned")
    assert code == 0, err
    code, _, err = sft("--resume", out, "training.epochs=2", "evaluation.enabled=no", model=new)
    assert code == 0, err


def test_settings_that_an_algorithm_has_not_are_refused_before_the_data_is_read(sft, tmp_path):
    missing = tmp_path / "nowhere.jsonl"
    code, _, err = sft("evolution.population_size=2", "evolution.ranges.beta={min: 0.1, max: 1}", data=missing)
    assert code == 2
    assert "evolution.ranges names beta, which SFT has not; possible: batch_size, lr" in err


def test_a_tournament_larger_than_the_population_is_told(sft, caplog):
    with caplog.at_level(logging.WARNING):
        code, _, err = sft("evolution.population_size=2", "evolution.tournament_size=5", "evaluation.enabled=no")
    assert code == 0, err
    assert "tournament_size 5 is more than the population of 2" in caplog.text + err
