"""Where the Liger kernel cannot run, the package's own loss does, and says so once."""

from __future__ import annotations

import logging

import pytest
import torch

from agilerl.losses import choose_loss, liger, linear_cross_entropy
from agilerl.models.head import Head


def test_the_cpu_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_told", set())
    with caplog.at_level(logging.WARNING):
        assert choose_loss(True, torch.device("cpu")) is linear_cross_entropy
        assert choose_loss(True, torch.device("cpu")) is linear_cross_entropy
    assert [record.getMessage() for record in caplog.records if "CUDA" in record.getMessage()] == [
        "use_liger_loss: the Liger kernel needs a CUDA device, and this agent is on cpu; the package's own loss computes, "
        "with the same result."
    ]


def test_not_asked_for_not_mentioned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_told", set())
    assert choose_loss(False, torch.device("cpu")) is linear_cross_entropy
    assert not caplog.records


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "has", lambda _: False)
    reason = liger.why_not_liger(torch.device("cuda"))
    assert reason is not None
    assert "pip install 'agilerl[liger]'" in reason


def test_unequal_weights_never_reach_the_kernel() -> None:
    head = Head(torch.nn.Linear(8, 20, bias=False))
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    targets, weights = torch.arange(5), torch.tensor([0.0, 1.0, 5.0, 1.0, 1.0])
    found = liger.liger_cross_entropy(hidden, head, targets, weights)  # would fail here without a GPU
    wanted = linear_cross_entropy(hidden, head, targets, weights)
    assert torch.equal(found.total, wanted.total)
