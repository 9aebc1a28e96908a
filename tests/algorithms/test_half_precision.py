"""In bfloat16 the faster forms stray no further from the exact run than the model's and PEFT's own code does."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig

from agilerl.algorithms.core import resources
from agilerl.algorithms.sft import SFT
from agilerl.models import rotary
from tests.algorithms.test_exactness import make_batch
from tests.helpers import tiny_model

STEPS = 12


def curve(dtype: torch.dtype, *, fast: bool, micro_batch_size: int) -> torch.Tensor:
    """Losses of a few steps, [STEPS], from the same weights (those of the bfloat16 model) whatever the dtype."""
    model = tiny_model("llama", dtype=torch.bfloat16).to(dtype)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    settings = {"lr": 2e-2, "batch_size": 8, "micro_batch_size_per_gpu": micro_batch_size}
    with ExitStack() as stack:
        if not fast:
            stack.enter_context(patch.object(resources, "accelerate", lambda model: {}))
            # Rotations are replaced for all models of a family: a fast run before this one has done so.
            stack.enter_context(patch.object(rotary, "in_micro_batch", lambda: False))
        agent = SFT(0, "<pad>", actor_network=model, lora_config=config, **settings)
        kinds = {type(module).__name__ for module in agent.actor.modules()}
        assert ("FusedLoraLinear" in kinds) is fast
        batch = make_batch()
        return torch.tensor([agent.learn(copy.deepcopy(batch))["loss"] for _ in range(STEPS)], dtype=torch.float64)


@pytest.mark.parametrize("has_products", [True, False])
def test_a_bfloat16_run_stays_within_the_spread_of_the_plain_one(
    has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agilerl.hardware._cpu_has_products", lambda dtype: has_products)
    exact = curve(torch.float64, fast=False, micro_batch_size=8)
    assert exact[-1] < exact[0] - 0.5  # it learns
    # The same numbers summed in another order: what rounding alone does to a plain run.
    plain = [curve(torch.bfloat16, fast=False, micro_batch_size=size) for size in (1, 2, 4, 8)]
    fused = [curve(torch.bfloat16, fast=True, micro_batch_size=size) for size in (2, 8)]
    spread = torch.stack([(run - exact).abs() for run in plain]).amax(0)
    for run in fused:
        strays = (run - exact).abs()
        assert strays.mean() <= 1.5 * spread.mean(), (strays, spread)
        assert strays.max() <= 2.0 * spread.max(), (strays, spread)
