"""Sizes that follow from the sizes that a user sets."""

from __future__ import annotations

import pytest

from agilerl.algorithms.core.plan import BatchPlan


def test_sizes_are_derived_and_clamped() -> None:
    plan = BatchPlan.derive(32, micro_batch_size_per_gpu=3, dp_size=2)
    assert (plan.batch_size_per_process, plan.mini_batch_size, plan.gradient_accumulation_steps) == (16, 16, 6)
    assert BatchPlan.derive(8, 64, 64).micro_batch_size_per_gpu == 8
    assert BatchPlan.derive(8, None, 3).num_optimizer_steps(8) == 3


def test_a_batch_that_does_not_divide_over_the_ranks_names_both() -> None:
    with pytest.raises(
        ValueError, match="batch_size 10 does not divide over 4 data-parallel ranks; use a multiple of 4"
    ):
        BatchPlan.derive(10, dp_size=4)


@pytest.mark.parametrize("name", ["batch_size", "mini_batch_size", "micro_batch_size_per_gpu"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_that_are_no_counts_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, found {value!r}"):
        BatchPlan.derive(**{"batch_size": 8, name: value})
