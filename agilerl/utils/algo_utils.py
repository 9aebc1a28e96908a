"""Learning-rate schedule."""

from agilerl.optim import CosineLRScheduleConfig

__all__ = ["CosineLRScheduleConfig"]
