"""Cosine learning-rate schedule with linear warm-up, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from agilerl.errors import ConfigError

__all__ = ["CosineLRScheduleConfig", "lr_multiplier", "multiplier_function"]


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Warm up linearly, then follow half a cosine from the peak to ``min_lr_ratio`` of it (arXiv 1608.03983, one cycle).

    One step is one ``learn`` call. The first step's rate is never zero: a step without effect would be a wasted batch.

    Args:
        num_steps: Steps until the rate reaches its floor; it stays there afterwards.
        warmup_proportion: Share of ``num_steps`` spent warming up, in [0, 1].
        min_lr_ratio: Floor, as a share of the peak, in [0, 1].
        actor_start_step: Steps before which the actor's rate is zero, for algorithms that warm up a critic first.

    Raises:
        ConfigError: A value is out of range.
    """

    num_steps: int
    warmup_proportion: float = 0.0
    min_lr_ratio: float = 0.1
    actor_start_step: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.num_steps < 1:
            problems.append(f"num_steps must be at least 1, found {self.num_steps}")
        for name in ("warmup_proportion", "min_lr_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                problems.append(f"{name} must lie in [0, 1], found {getattr(self, name)}")
        if self.actor_start_step < 0:
            problems.append(f"actor_start_step must not be negative, found {self.actor_start_step}")
        if problems:
            raise ConfigError("Learning-rate schedule: " + "; ".join(problems))


def lr_multiplier(config: CosineLRScheduleConfig | None, step: int, *, is_critic: bool = False) -> float:
    """Share of the peak rate that step ``step`` (0-based) trains with; 1 without a schedule."""
    if config is None:
        return 1.0
    if not is_critic:
        if step < config.actor_start_step:
            return 0.0
        step -= config.actor_start_step
    warmup_steps = round(config.num_steps * config.warmup_proportion)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = config.num_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def multiplier_function(config: CosineLRScheduleConfig, *, is_critic: bool = False) -> Callable[[int], float]:
    """The multiplier as a function of the step alone, as ``torch.optim.lr_scheduler.LambdaLR`` takes it."""
    return lambda step: lr_multiplier(config, step, is_critic=is_critic)
