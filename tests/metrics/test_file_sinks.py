from __future__ import annotations

import csv
import json
import math

import pytest

from agilerl.metrics import RECORD_KEYS
from agilerl.metrics.sinks import CSVSink, JSONLSink


def train(rows):
    return {"kind": "train", "rows": rows, "loss": 1.0 / rows}


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_all(sink, records):
    for record in records:
        sink.write(record)
    sink.close()


def test_csv_has_one_header_and_blanks(tmp_path):
    path = tmp_path / "logs" / "metrics.csv"
    write_all(CSVSink(path), [train(1), train(2), {"kind": "eval", "rows": 2, "fitness": -0.5}, train(3)])
    rows = read(path)
    assert list(rows[0]) == list(RECORD_KEYS)
    assert [row["kind"] for row in rows] == ["train", "train", "eval", "train"]
    assert [row["fitness"] for row in rows] == ["", "", "-0.5", ""]
    assert path.read_text().count("kind,") == 1


def test_csv_columns_that_arrive_later_join_at_the_end(tmp_path):
    path = tmp_path / "m.csv"
    sink = CSVSink(path)
    write_all(sink, [train(1), {**train(2), "accuracy": 0.5}, train(3)])
    rows = read(path)
    assert list(rows[0]) == [*RECORD_KEYS, "accuracy"]
    assert [row["accuracy"] for row in rows] == ["", "0.5", ""]
    assert [row["rows"] for row in rows] == ["1", "2", "3"]


@pytest.mark.parametrize("sink_type", [CSVSink, JSONLSink])
def test_resuming_continues_without_repeated_or_missing_records(tmp_path, sink_type):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    write_all(sink_type(straight), [train(rows) for rows in range(1, 7)])

    write_all(sink_type(broken), [train(rows) for rows in range(1, 5)])
    with broken.open("a") as file:
        file.write('{"kind": "tr')  # killed while writing
    resumed = sink_type(broken)
    resumed.resume(records=3, rows=3)
    write_all(resumed, [train(rows) for rows in range(4, 7)])
    assert broken.read_bytes() == straight.read_bytes()


def test_a_resumed_csv_keeps_the_columns_it_has(tmp_path):
    path = tmp_path / "m.csv"
    write_all(CSVSink(path), [{**train(1), "accuracy": 0.5}])
    sink = CSVSink(path)
    sink.resume(1, 1)
    write_all(sink, [{**train(2), "accuracy": 0.7}])
    assert [row["accuracy"] for row in read(path)] == ["0.5", "0.7"]


def test_resuming_a_file_that_is_gone_starts_a_new_one(tmp_path):
    sink = CSVSink(tmp_path / "m.csv")
    sink.resume(7, 7)
    write_all(sink, [train(8)])
    assert [row["rows"] for row in read(tmp_path / "m.csv")] == ["8"]


def test_a_new_run_moves_an_earlier_file_aside(tmp_path):
    path = tmp_path / "m.csv"
    for rows in (1, 2, 3):
        write_all(CSVSink(path), [train(rows)])
    assert [row["rows"] for row in read(path)] == ["3"]
    assert [row["rows"] for row in read(tmp_path / "m.1.csv")] == ["1"]
    assert [row["rows"] for row in read(tmp_path / "m.2.csv")] == ["2"]


def test_text_with_line_breaks_stays_on_one_line(tmp_path):
    write_all(CSVSink(tmp_path / "m.csv"), [{"kind": "event", "message": 'a, "b"\nc'}])
    assert read(tmp_path / "m.csv")[0]["message"] == 'a, "b" c'
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 2


def test_json_lines_are_strict(tmp_path):
    def refuse(text):
        raise AssertionError(text)

    write_all(JSONLSink(tmp_path / "m.jsonl"), [{"loss": math.nan, "lr": math.inf, "rows": 1, "message": "Grüße"}])
    (line,) = (tmp_path / "m.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=refuse) == {"loss": None, "lr": None, "rows": 1, "message": "Grüße"}
