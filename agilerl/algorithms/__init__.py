"""Algorithms: supervised fine-tuning and, after it, preference optimisation."""

from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT

__all__ = ["DPO", "SFT"]
