"""Optimizer, learning-rate schedule and the guarded optimizer step."""

from agilerl.optim.adamw import MasterAdamW
from agilerl.optim.schedule import CosineLRScheduleConfig, lr_multiplier, multiplier_function
from agilerl.optim.step import clip_gradients
from agilerl.optim.wrapper import OptimizerWrapper

__all__ = [
    "CosineLRScheduleConfig",
    "MasterAdamW",
    "OptimizerWrapper",
    "clip_gradients",
    "lr_multiplier",
    "multiplier_function",
]
