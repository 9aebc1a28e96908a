"""The schedule against its documented values, and torch's own scheduler on top of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agilerl.algorithms.core.base import LLMAlgorithm
from agilerl.optim import CosineLRScheduleConfig, OptimizerWrapper, lr_multiplier


def test_documented_multipliers() -> None:
    config = CosineLRScheduleConfig(10, warmup_proportion=0.2)
    found = [lr_multiplier(config, step) for step in range(11)]
    assert found == pytest.approx([0.5, 1, 1, 0.966, 0.868, 0.722, 0.55, 0.378, 0.232, 0.134, 0.1], abs=5e-4)
    assert lr_multiplier(config, 1000) == pytest.approx(0.1)
    assert lr_multiplier(None, 7) == 1.0


def test_actor_start_step_holds_the_actor_back_and_not_the_critic() -> None:
    config = CosineLRScheduleConfig(10, actor_start_step=3)
    assert [lr_multiplier(config, s) for s in (0, 2)] == [0.0, 0.0]
    assert lr_multiplier(config, 3) == 1.0
    assert lr_multiplier(config, 0, is_critic=True) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"num_steps": 0}, {"num_steps": 5, "warmup_proportion": 1.5}, {"num_steps": 5, "min_lr_ratio": -0.1}]
)
def test_values_out_of_range(wrong: dict) -> None:
    with pytest.raises(ValueError, match="Learning-rate schedule"):
        CosineLRScheduleConfig(**wrong)


def test_update_lr_builds_a_scheduler_at_a_step() -> None:
    wrapper = OptimizerWrapper(torch.optim.AdamW, {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}, 1e-3)
    assert LLMAlgorithm.update_lr(wrapper, (2e-3, 5e-3)) is None
    assert [g["lr"] for g in wrapper.param_groups] == [2e-3, 5e-3]
    scheduler = LLMAlgorithm.update_lr(wrapper, 1e-2, CosineLRScheduleConfig(10, warmup_proportion=0.2), 3)
    assert scheduler is not None
    assert wrapper.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9657, rel=1e-3)
    wrapper.optimizer.step()
    scheduler.step()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.868, rel=1e-3)
