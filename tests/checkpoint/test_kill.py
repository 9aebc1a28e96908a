"""A run that is killed at random moments and resumed each time ends like one that was not."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agilerl.checkpoint import CheckpointContent, read_checkpoint, verify
from tests.checkpoint.test_round_trip import same

TIMES = {"tokens_per_s", "real_tokens_per_s", "elapsed_s", "peak_memory_gib"}


def broken_runs(kind: str, folder: Path, kills: int) -> list[Path]:
    command = [sys.executable, "-m", "tests.checkpoint.kill_driver", kind, str(folder), str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    logs = "".join(path.read_text() for path in folder.glob("*/run.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert done.stdout.count("-> -9") == kills
    return sorted(folder.glob("broken-*"))


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def batches(folder: Path) -> dict[str, str]:
    """(agent, rows before) -> hash of the batch; a batch that was trained again after a kill was the same one."""
    found: dict[str, str] = {}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        agent, rows, digest = json.loads(line)
        assert found.setdefault(f"{agent} at {rows}", digest) == digest
    return found


def contents(folder: Path) -> list[CheckpointContent]:
    members = sorted((folder / "out" / "population").glob("*"))
    return [read_checkpoint(path, need_tokenizer=False) for path in [folder / "out", *members]]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list | tuple) else value


def without_draws(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the last value that a mutable hyper-parameter drew: agents carry their own values, in their state."""
    ranges = settings.get("hp_config") or {}
    drawn = {name: {k: v for k, v in fields.items() if k != "value"} for name, fields in ranges.items()}
    return settings | {"hp_config": drawn}


def compare(unbroken: Path, broken: Path) -> None:
    assert metrics(broken) == metrics(unbroken)
    assert batches(broken) == batches(unbroken)
    assert verify(broken / "out").is_ok
    for one, other in zip(contents(broken), contents(unbroken), strict=True):
        for name, adapter in other.adapters.items():
            assert same(one.adapters[name].tensors, adapter.tensors)
        if other.full_model is not None:
            assert one.full_model is not None
            assert same(one.full_model.tensors, other.full_model.tensors)
        assert other.adapters or other.full_model
        assert other.algorithm == "SFT" or {"actor", "reference"} <= set(other.adapters)
        assert other.optimizer is not None
        assert same(one.optimizer, other.optimizer)
        assert same(without_draws(one.settings), without_draws(other.settings))
        assert same(without_times(one.state), without_times(other.state))
        assert same(without_times(one.training), without_times(other.training))


CASES = [
    pytest.param("lora", 8, id="lora-8"),
    pytest.param("full", 3, id="full-3"),
    pytest.param("population", 3, id="population-3"),
    pytest.param("dpo", 3, id="dpo-3"),
    pytest.param("lora", 50, id="lora-50", marks=pytest.mark.slow),
    pytest.param("full", 12, id="full-12", marks=pytest.mark.slow),
    pytest.param("population", 12, id="population-12", marks=pytest.mark.slow),
    pytest.param("dpo", 20, id="dpo-20", marks=pytest.mark.slow),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "kills"), CASES)
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, kind: str, kills: int) -> None:
    runs = broken_runs(kind, tmp_path, kills)
    assert runs
    for run in runs:
        compare(tmp_path / "unbroken", run)
