"""Groups, masters and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agilerl.optim import MasterAdamW, OptimizerWrapper, clip_gradients


def test_only_matrices_decay() -> None:
    wrapper = OptimizerWrapper(torch.optim.AdamW, nn.Linear(3, 2), 1e-3, {"weight_decay": 0.1})
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in wrapper.param_groups] == [(2, 0.1), (1, 0.0)]


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(ValueError, match="Nothing is trainable"):
        OptimizerWrapper(torch.optim.AdamW, nn.Linear(2, 2).requires_grad_(False), 1e-3)


def test_masters_follow_float32_training_exactly() -> None:
    torch.manual_seed(0)
    low = nn.Parameter(torch.randn(64).bfloat16())
    full = nn.Parameter(low.detach().float())
    ours, theirs = MasterAdamW([low], lr=1e-4), torch.optim.AdamW([full], lr=1e-4)
    for _ in range(20):
        grad = torch.randn(64).bfloat16()
        low.grad, full.grad = grad.clone(), grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(ours.state[low]["master"], full.data)
    assert torch.equal(low.data, full.data.bfloat16())
    assert low.dtype == low.grad.dtype == torch.bfloat16


def test_weights_written_by_somebody_else_win_over_the_master() -> None:
    p = nn.Parameter(torch.zeros(4).bfloat16())
    optimizer = MasterAdamW([p], lr=1e-3)
    p.grad = torch.ones(4).bfloat16()
    optimizer.step()
    with torch.no_grad():
        p.fill_(5.0)
    p.grad = torch.zeros(4).bfloat16()
    optimizer.step()
    assert torch.allclose(optimizer.state[p]["master"], torch.full((4,), 5.0), atol=0.1)


def test_clipping_scales_to_the_norm() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    clip_gradients([p], 5.0, None)
    assert p.grad.tolist() == [3.0, 4.0]
    clip_gradients([p], 5.0, 1.0)
    assert p.grad.tolist() == pytest.approx([0.6, 0.8])
