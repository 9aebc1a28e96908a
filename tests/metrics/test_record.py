from __future__ import annotations

import numpy as np
import pytest

from agilerl.metrics import AgentRecord


def test_history_survives_a_round_trip_as_plain_data():
    record = AgentRecord()
    record.add_scores([1, 2.5, [1, 2]])
    record.fitness.extend([-1.0, np.float32(-0.5), np.array([1.0, 2.0])])
    record.open()
    record.close(32)
    copy = record.copy()
    assert copy.scores == [1.0, 2.5, [1.0, 2.0]]
    assert copy.fitness[:2] == [-1.0, -0.5]
    assert np.array_equal(copy.fitness[2], [1.0, 2.0])
    assert copy.steps == 32


def test_a_copy_is_independent():
    record = AgentRecord(scores=[[1.0]])
    copy = record.copy()
    copy.scores[0].append(2.0)  # type: ignore[union-attr]
    copy.fitness.append(1.0)
    assert record.scores == [[1.0]]
    assert record.fitness == []


def test_steps_grow_by_rows_and_speed_is_that_of_the_block():
    record = AgentRecord()
    record.open()
    record.close(10)
    record.close(5)  # without an opened block there is no speed to measure
    assert record.steps == 15
    assert record.rows_per_s > 0
    with pytest.raises(ValueError, match="num_steps is -1"):
        record.close(-1)
