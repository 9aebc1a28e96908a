"""How many rows go into a batch, an optimizer step and a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from agilerl.errors import ConfigError

__all__ = ["BatchPlan"]


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one ``learn`` call on one rank, derived from the sizes that a user sets.

    Attributes:
        batch_size: Rows per ``learn`` over all data-parallel ranks (prompt groups where ``group_size`` > 1).
        batch_size_per_process: Rows of one replica.
        mini_batch_size: Rows per optimizer step of one replica.
        micro_batch_size_per_gpu: Most rows per forward pass; None leaves it to a token budget.
    """

    batch_size: int
    batch_size_per_process: int
    mini_batch_size: int
    micro_batch_size_per_gpu: int | None

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step; 1 where a token budget decides instead of a number of rows."""
        micro = self.micro_batch_size_per_gpu
        return 1 if micro is None else -(-self.mini_batch_size // micro)

    def num_optimizer_steps(self, num_rows: int) -> int:
        """Optimizer steps that ``num_rows`` rows of this rank make."""
        return -(-num_rows // self.mini_batch_size)

    @classmethod
    def derive(
        cls,
        batch_size: int,
        micro_batch_size_per_gpu: int | None = None,
        mini_batch_size: int | None = None,
        *,
        dp_size: int = 1,
        group_size: int = 1,
    ) -> BatchPlan:
        """Derive the sizes of a replica; mini and micro sizes need not divide, and larger ones are clamped.

        Raises:
            ConfigError: A size is below 1, or ``batch_size`` does not divide over the data-parallel ranks.
        """
        sizes = {
            "batch_size": batch_size,
            "mini_batch_size": mini_batch_size,
            "micro_batch_size_per_gpu": micro_batch_size_per_gpu,
            "group_size": group_size,
        }
        problems = [
            f"{name} must be a whole number of at least 1, found {value!r}"
            for name, value in sizes.items()
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
        ]
        if not problems and batch_size % dp_size:
            problems.append(
                f"batch_size {batch_size} does not divide over {dp_size} data-parallel ranks; "
                f"use a multiple of {dp_size}"
            )
        if problems:
            raise ConfigError("; ".join(problems) + ".")
        per_process = batch_size // dp_size * group_size
        mini = min(mini_batch_size or per_process, per_process)
        micro = None if micro_batch_size_per_gpu is None else min(micro_batch_size_per_gpu, mini)
        return cls(batch_size, per_process, mini, micro)
