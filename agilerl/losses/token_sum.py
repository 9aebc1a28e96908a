"""What every loss of this package returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TokenSum"]


class TokenSum(NamedTuple):
    """A sum over tokens and the sum of their weights, kept apart so that the division happens once per optimizer step.

    Dividing early (per row, micro-batch or rank) would count the tokens of short rows more than those of long ones.
    """

    total: Tensor
    """Scalar, differentiable: sum of weight x negative log-likelihood; float32, float64 for float64 models."""
    weight: Tensor
    """Scalar without gradient: sum of the weights."""
