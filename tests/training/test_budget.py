from __future__ import annotations

from dataclasses import dataclass

import pytest

from agilerl.training.llm.budget import Budget


@dataclass
class At:
    rows: int
    epochs: int = 0


def test_epochs_become_rows_where_the_size_is_known():
    budget = Budget.of(max_steps=None, num_epochs=3, rows_per_epoch=10)
    assert budget.rows == 30
    assert budget.room(At(28), wanted=8) == 2
    assert budget.room(At(30), wanted=8) == 0
    assert budget.is_spent([At(30), At(31)])
    assert not budget.is_spent([At(30), At(29)])


def test_streams_count_passes():
    budget = Budget.of(max_steps=None, num_epochs=2, rows_per_epoch=None)
    assert budget.rows is None
    assert budget.room(At(1000, epochs=1), wanted=8) == 8
    assert budget.room(At(1000, epochs=2), wanted=8) == 0


def test_rows_are_exact():
    assert Budget.of(max_steps=13, num_epochs=None, rows_per_epoch=None).room(At(8), wanted=8) == 5
    with pytest.raises(ValueError, match="max_steps or num_epochs"):
        Budget.of(max_steps=None, num_epochs=None, rows_per_epoch=5)


def test_iterations_of_a_budget():
    budget = Budget(rows=27)
    assert budget.num_iterations(batch_size=4, rows_per_epoch=9) == 9
    assert budget.num_iterations(batch_size=100, rows_per_epoch=9) == 3
    assert budget.num_iterations(batch_size=4, rows_per_epoch=None) == 7
    assert Budget(rows=None, epochs=2).num_iterations(batch_size=4, rows_per_epoch=None) is None
