from __future__ import annotations

import pytest

from agilerl.errors import DataError, MissingExtraError, OutputError
from agilerl.metrics.report import plot_run, read_records, summarise
from agilerl.metrics.sinks import CSVSink, JSONLSink

RECORDS = [
    {
        "kind": "train",
        "agent": 0,
        "rows": 8,
        "loss": 2.0,
        "lr": 1e-3,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "elapsed_s": 2.0,
    },
    {"kind": "eval", "agent": 0, "rows": 8, "loss": 1.5},
    {
        "kind": "train",
        "agent": 0,
        "rows": 16,
        "loss": 1.0,
        "lr": 1e-3,
        "tokens": 100,
        "tokens_per_s": 70.0,
        "elapsed_s": 4.0,
    },
    {"kind": "eval", "agent": 0, "rows": 16, "loss": 1.75, "peak_memory_gib": 0.5, "elapsed_s": 65.0},
    {"kind": "event", "agent": 0, "message": "saved"},
]


@pytest.mark.parametrize(("sink", "name"), [(CSVSink, "m.csv"), (JSONLSink, "m.jsonl")])
def test_records_survive_their_files(tmp_path, sink, name):
    target = sink(tmp_path / name)
    for record in RECORDS:
        target.write(record)
    target.close()
    read = read_records(tmp_path / name)
    kept = [{key: value for key, value in record.items() if value not in (None, "")} for record in read]
    assert kept == RECORDS


def test_a_summary_states_the_facts():
    assert summarise(RECORDS).splitlines() == [
        "trained    16 rows, 200 tokens",
        "loss       2.0000 -> 1.0000",
        "held out   1.5000 -> 1.7500, best 1.5000 after 8 rows",
        "speed      60 trained tokens/s",
        "memory     0.50 GiB at most",
        "time       0:01:05",
    ]


def test_agents_are_told_apart():
    text = summarise([*RECORDS, {**RECORDS[0], "agent": 1}])
    assert "agent 0\n" in text
    assert "\n\nagent 1\ntrained    8 rows" in text
    assert summarise([]) == ""


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_run([*RECORDS, {**RECORDS[0], "agent": 1, "loss": float("nan")}], tmp_path / "plots" / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OutputError, match="cannot be written"):
        plot_run(RECORDS, tmp_path / "run.nonsense")


def test_plots_need_their_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("agilerl.optional.has", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agilerl\[plots\]'"):
        plot_run(RECORDS, tmp_path / "run.png")


def test_files_that_are_no_records_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.jsonl").write_text("{\n")
    for name in ("a.csv", "b.jsonl", "missing.csv"):
        with pytest.raises(DataError):
            read_records(tmp_path / name)
