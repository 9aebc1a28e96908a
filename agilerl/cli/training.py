"""What the commands that train share: signals, and how to go on after one."""

from __future__ import annotations

import shlex
import sys

from agilerl.recipes.describe import Description
from agilerl.recipes.run import Recipe, fine_tune
from agilerl.training.llm.signals import STOPPED, stop_signals

__all__ = ["train"]


def train(kind: str, description: Description) -> int:
    """Run a description; Ctrl-C and SIGTERM save at the next safe point and say how to go on."""
    try:
        with stop_signals(defer=False):
            fine_tune(description, _recipe(kind))
    except STOPPED as stop:
        sys.stderr.write(f"\n{stop}\n")
        if stop.path is not None:
            sys.stderr.write(f"Go on with:  agilerl {kind} --resume {shlex.quote(str(stop.path))}\n")
        return stop.exit_code
    return 0


def _recipe(kind: str) -> Recipe:
    from agilerl.recipes.dpo import DPO_RECIPE
    from agilerl.recipes.sft import SFT_RECIPE

    return {"sft": SFT_RECIPE, "dpo": DPO_RECIPE}[kind]
