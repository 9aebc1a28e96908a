"""The recipe of supervised fine-tuning."""

from __future__ import annotations

from agilerl.algorithms.sft import SFT
from agilerl.recipes.evaluation import evaluate
from agilerl.recipes.report import Reporter
from agilerl.recipes.run import Recipe

__all__ = ["SFT_RECIPE"]

SFT_RECIPE = Recipe(
    name="sft",
    objective="sft",
    algorithm=SFT,
    measure=evaluate,
    measured=Reporter.measured,
    compare=Reporter.comparison,
)
