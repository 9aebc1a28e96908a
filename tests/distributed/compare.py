"""Runs that must be equal."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.distributed.scenarios import Run


def assert_same_run(found: Run, expected: Run, tolerance: float) -> None:
    """Loss, gradient norm and tokens of every step, and every weight, relative to their size where that exceeds 1."""
    mine, theirs = (torch.tensor(run["metrics"], dtype=torch.float64) for run in (found, expected))
    assert mine.shape == theirs.shape
    assert torch.isfinite(mine).all()
    assert torch.equal(mine[:, 2], theirs[:, 2])
    worst = ((mine - theirs).abs() / theirs.abs().clamp_min(1)).max().item()
    assert worst <= tolerance, f"metrics differ by {worst}"
    assert_same_tensors(found["weights"], expected["weights"], tolerance)


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """The same names, and values within ``tolerance`` of each other."""
    assert found.keys() == expected.keys()
    assert found
    for name, tensor in expected.items():
        worst = (found[name].double() - tensor.double()).abs().max().item()
        assert worst <= tolerance * max(1.0, tensor.abs().max().item()), f"{name} differs by {worst}"
