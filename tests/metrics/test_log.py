from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agilerl.metrics import MetricsLog
from agilerl.metrics.log import plain_record


class Memory:
    def __init__(self):
        self.records, self.resumed, self.closed = [], None, 0

    def write(self, record):
        self.records.append(record)

    def resume(self, records, rows):
        self.resumed = (records, rows)

    def close(self):
        self.closed += 1


class Broken(Memory):
    def write(self, record):
        raise ConnectionError("no route to host")


def test_values_become_plain():
    record = plain_record(
        {"a": torch.tensor(2.0), "b": np.float32(0.5), "c": np.int64(3), "d": True, "e": None, "f": "x"}
    )
    assert record == {"a": 2.0, "b": 0.5, "c": 3, "d": 1, "e": None, "f": "x"}
    assert [type(value) for value in record.values()] == [float, float, int, int, type(None), str]
    assert math.isnan(plain_record({"a": torch.tensor(math.nan)})["a"])  # type: ignore[arg-type]


def test_a_failing_sink_warns_once_and_the_others_go_on():
    memory = Memory()
    log = MetricsLog([Broken(), memory])
    with pytest.warns(RuntimeWarning, match=r"Broken failed and is switched off \(no route to host\)"):
        log.log({"kind": "train", "rows": 1})
    log.log({"kind": "train", "rows": 2})  # a second warning would be an error here
    assert [record["rows"] for record in memory.records] == [1, 2]


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    class Stuck(Memory):
        def close(self):
            raise OSError("disk full")

    memory = Memory()
    log = MetricsLog([Stuck(), memory])
    with pytest.warns(RuntimeWarning, match="disk full"):
        log.close()
    log.close()
    assert memory.closed == 1


def test_history_keeps_the_kinds_asked_for():
    log = MetricsLog(history=("eval",))
    log.log({"kind": "train", "rows": 1})
    log.log({"kind": "eval", "rows": 1, "loss": 2.0})
    assert log.history == [{"kind": "eval", "rows": 1, "loss": 2.0}]


def test_resuming_tells_the_sinks_where_the_checkpoint_stands():
    log = MetricsLog()
    for rows in (8, 16, 16):
        log.log({"kind": "eval", "rows": rows})
    memory = Memory()
    resumed = MetricsLog([memory])
    resumed.load_state_dict(log.state_dict())
    assert memory.resumed == (3, 16)
    assert resumed.history == log.history
    assert resumed.records == 3
