from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from agilerl.config import load_config
from agilerl.metrics.sinks import CSVSink


def records_of(folder):
    with (folder / "logs" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_from_rows_to_chat(sft, agilerl, tmp_path):
    code, out, err = sft("training.epochs=2", "sft.lr=1e-2", "sft.batch_size=4", "checkpoint.steps=16")
    folder = tmp_path / "out"
    assert code == 0, err
    assert "before   held-out loss" in out
    assert "exact match" in out
    assert out.count("  asked   ") == 4
    assert f"Talk to it:  agilerl chat {folder}" in out
    assert "trained tok/s  loss" in err
    before, after = (float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if "held-out loss" in line)
    assert after < before

    rows = [record["rows"] for record in records_of(folder) if record["kind"] == "train"]
    assert rows == [str(4 * number) for number in range(1, 9)]

    code, answer, err = agilerl("chat", folder, "--message", "abc", "--max-new-tokens", "4")
    assert (code, err) == (0, "")
    assert answer.endswith("\n")

    code, out, _ = agilerl("evaluate", folder, "--json")
    assert code == 0
    assert json.loads(out)["loss"] == pytest.approx(after, abs=6e-5)


def test_the_effective_settings_are_saved_and_their_origin_is_shown(sft, tmp_path):
    code, out, _ = sft("sft.lr=1e-3", "evaluation.enabled=no")
    saved = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert code == 0
    assert saved["sft"]["lr"] == 1e-3
    assert saved["lora"]["rank"] == 16
    line = next(line for line in out.splitlines() if line.startswith("  sft.lr"))
    assert line.split() == ["sft.lr", "0.001", "(command", "line)"]


def test_show_config_tells_where_every_setting_comes_from(agilerl, tmp_path):
    (tmp_path / "run.yaml").write_text("sft:\n  lr: 1e-3\n")
    code, out, _ = agilerl("sft", tmp_path / "run.yaml", "lora.rank=4", "--data", "x.jsonl", "--show-config")
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert code == 0
    assert found["sft.lr"].split() == ["0.001", "(run.yaml:2)"]
    assert found["lora.rank"].split() == ["4", "(command", "line)"]
    assert found["lora.alpha"].split() == ["32.0", "(default)"]


def test_without_arguments_it_is_the_demonstration(agilerl):
    code, out, _ = agilerl("sft", "--show-config")
    found = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert "smollm2-135m" in found["model.name"]
    assert "(demonstration)" in found["training.epochs"]


def test_full_fine_tuning_and_its_chat(sft, agilerl, tmp_path):
    code, out, err = sft("lora.enabled=false", "sft.lr=1e-3", "evaluation.samples=1")
    assert code == 0, err
    assert "(100.00%)" in out
    code, _, err = agilerl("chat", tmp_path / "out", "-m", "abc", "--max-new-tokens", "3")
    assert (code, err) == (0, "")


def test_all_weights_in_one_file_can_be_chatted_with(sft, agilerl, tmp_path):
    code, _, err = sft("checkpoint.lora_only=false", "evaluation.enabled=false")
    assert code == 0, err
    code, _, err = agilerl("chat", tmp_path / "out", "-m", "abc", "--max-new-tokens", "3")
    assert (code, err) == (0, "")


def test_a_folder_with_a_checkpoint_is_not_overwritten_by_accident(sft, tmp_path):
    assert sft("evaluation.enabled=false")[0] == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, _, err = sft("evaluation.enabled=false")
    assert code == 2
    assert "holds a checkpoint of SFT" in err
    assert "--resume" in err
    assert "--overwrite" in err
    assert sft("--overwrite", "evaluation.enabled=false")[0] == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def adapter_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_resuming_equals_the_unbroken_run(sft, agilerl, tmp_path):
    words = ["sft.lr=1e-2", "sft.batch_size=4", "lora.dropout=0.1", "evaluation.enabled=false"]
    assert sft("training.epochs=2", *words, output=tmp_path / "straight")[0] == 0
    assert sft("training.epochs=1", *words, output=tmp_path / "parts")[0] == 0
    code, out, err = agilerl("sft", "--resume", tmp_path / "parts", "training.epochs=2")
    assert code == 0, err
    assert "training.epochs: 1 -> 2" in out
    straight, parts = adapter_of(tmp_path / "straight"), adapter_of(tmp_path / "parts")
    assert all(torch.equal(straight[name], parts[name]) for name in straight)

    def trained(folder):
        return [(record["rows"], record["loss"]) for record in records_of(folder) if record["kind"] == "train"]

    assert trained(tmp_path / "parts") == trained(tmp_path / "straight")


def test_settings_that_a_checkpoint_refuses_are_not_kept(sft, agilerl, tmp_path):
    assert sft("evaluation.enabled=false")[0] == 0
    before = (tmp_path / "out" / "run.yaml").read_text()
    code, _, err = agilerl("sft", "--resume", tmp_path / "out", "training.epochs=2", "lora.rank=3")
    assert code == 2
    assert "r is 16 there and 3 here" in err
    assert (tmp_path / "out" / "run.yaml").read_text() == before
    code, _, err = agilerl("sft", "--resume", tmp_path / "out", "training.epochs=2")
    assert code == 0, err
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["training"]["epochs"] == 2


def test_a_description_in_the_output_folder_is_not_written_over(sft, tmp_path):
    (tmp_path / "run.yaml").write_text("# mine\nsft:\n  lr: 1e-3\n")
    code, _, err = sft(tmp_path / "run.yaml", output=tmp_path)
    assert code == 2
    assert "would write its own run.yaml over it" in err
    assert (tmp_path / "run.yaml").read_text().startswith("# mine")


def test_resuming_from_nowhere_is_a_sentence(agilerl, tmp_path):
    assert "There is no checkpoint" in agilerl("sft", "--resume", tmp_path / "nothing")[2]
    (tmp_path / "empty").mkdir()
    code, _, err = agilerl("sft", "--resume", tmp_path / "empty")
    assert code == 2
    assert "no run.yaml beside it" in err


def test_evolution_prints_lineage_and_winning_settings(sft, tmp_path):
    code, out, err = sft(
        "evolution.population_size=2",
        "evolution.evo_steps=2",
        "training.evaluation_interval=2",
        "sft.batch_size=4",
        "evaluation.enabled=false",
    )
    assert code == 0, err
    assert "Settings of the best member" in out
    winner = load_config(tmp_path / "out" / "winner.yaml").config
    assert f"  sft.lr: {winner.sft.lr:.6g}" in out
    assert 5e-6 <= winner.sft.lr <= 5e-4
    assert winner.evolution.population_size == 1
    assert (tmp_path / "out" / "adapter_config.json").exists()


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "exit_code"), STOPS)
def test_a_signal_saves_and_says_how_to_go_on(sft, agilerl, tmp_path, monkeypatch, number, exit_code):
    write = CSVSink.write

    def write_and_stop(sink, record):
        write(sink, record)
        if record["kind"] == "train" and record["rows"] == 8:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(CSVSink, "write", write_and_stop)
    code, _, err = sft("training.epochs=3", "evaluation.enabled=no", "sft.batch_size=4")
    assert code == exit_code, err
    assert f"Go on with:  agilerl sft --resume {tmp_path / 'out'}" in err
    monkeypatch.setattr(CSVSink, "write", write)
    code, _, err = agilerl("sft", "--resume", tmp_path / "out")
    assert code == 0, err
    rows = [record["rows"] for record in records_of(tmp_path / "out") if record["kind"] == "train"]
    assert rows == [str(4 * number) for number in range(1, 13)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), STOPS)
def test_a_signal_to_a_process_gives_its_exit_code(model_folder, rows, tmp_path, number, exit_code):
    train, test = rows
    command = [sys.executable, "-m", "agilerl", "sft", "--model", model_folder, "--data", train, "--test-data", test]
    command += ["--output", tmp_path / "out", "training.epochs=100000", "evaluation.enabled=no", "sft.batch_size=2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    log = tmp_path / "out" / "logs" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_code, err
    assert "Traceback" not in err
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


# Bad input: one sentence, exit code 2, no traceback, and nothing trained.


def refused(result, *parts):
    code, _, err = result
    assert code == 2, err
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def write_rows(tmp_path, *records):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GOOD = {"prompt": "a", "response": "b"}


def test_an_empty_split_is_refused(sft, tmp_path):
    refused(sft(data=write_rows(tmp_path)), "empty")


def test_a_missing_column_lists_those_there_are(sft, tmp_path):
    path = write_rows(tmp_path, {"prompt": "a", "reply": "b"})
    refused(sft("data.response_column=answer", data=path), "answer", "reply")


@pytest.mark.parametrize("bad", [None, 7, ["x"]])
def test_a_null_or_foreign_field_names_its_row(sft, tmp_path, bad):
    refused(sft(data=write_rows(tmp_path, GOOD, {"prompt": "a", "response": bad})), "row 1", "response")


def test_a_missing_data_file_is_refused(sft, tmp_path):
    refused(sft(data=tmp_path / "nothing.jsonl"), "nothing.jsonl")


def test_a_model_that_cannot_be_found_is_refused(sft, tmp_path):
    refused(sft(model=tmp_path / "no-model"), "no-model")


def test_a_name_near_a_preset_is_corrected(sft, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(sft(model="smollm2-135"), "did you mean the preset 'smollm2-135m'?")


def test_no_model_at_all_is_refused(sft):
    refused(sft(model=""), "model")


@pytest.mark.parametrize("targets", ["[q_proj, qkv_typo]", "nothing_here"])
def test_lora_targets_that_match_nothing_list_candidates(sft, targets):
    refused(sft(f"lora.target_modules={targets}"), "q_proj")


@pytest.mark.parametrize(
    "setting", ["sft.lr=-1", "sft.lr=nan", "sft.batch_size=0", "sft.max_grad_norm=inf", "lora.rank=-2"]
)
def test_impossible_numbers_are_refused(sft, setting):
    refused(sft(setting), setting.split("=")[0])


def test_an_unknown_device_is_refused(sft):
    refused(sft("model.device=tpu9"), "tpu9")


def test_a_loss_that_is_not_finite_ends_the_run(sft):
    code, _, err = sft("evaluation.enabled=no", "sft.lr=1e20", "sft.max_grad_norm=1e20", "sft.batch_size=4")
    assert code == 2
    assert "Error: Non-finite training step" in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(sft, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(sft(output=locked / "out"), "cannot be")


@pytest.mark.parametrize("place", ["file", "/proc/agilerl"])
def test_an_output_that_cannot_be_written_is_refused_before_training(sft, tmp_path, place):
    (tmp_path / "file").write_text("x")
    output = tmp_path / place if place == "file" else place
    result = sft(output=output)
    refused(result, str(output))
    assert "held-out loss" not in result[1]
