"""The fused rotation computes what models' own functions do, in micro-batches only; other functions are left alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from agilerl.models import rotary
from agilerl.models.forms import fast_forms
from tests.helpers import tiny_model

IDS = torch.arange(18).view(2, 9) + 7


def draw(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(model: Any) -> list[Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_logits_and_gradients(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype).requires_grad_(True)
    expected = results(model)
    assert rotary.install(model) == 2
    assert rotary.install(model) == 2
    assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))  # not in a micro-batch
    limit = 5e-6 if dtype == torch.float32 else 0.04
    with fast_forms():
        for found, wanted in zip(results(model), expected, strict=True):
            assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < limit


def test_value_and_gradient_against_float64() -> None:
    x, cos, sin = (draw(1, 3, 5, 8, seed=i, dtype=torch.float64) for i in range(3))
    x.requires_grad_(True)
    turned: Any = rotary._Rotation.apply
    exact = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    assert torch.allclose(turned(x, cos, sin), exact, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: turned(x, cos, sin), x)


@pytest.mark.parametrize("reason", ["float64", "partial", "mixed precision"])
def test_what_it_does_not_compute_goes_to_the_model_s_own_function(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    rotary.install(tiny_model("llama"))
    function = importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    dtype = torch.float64 if reason == "float64" else torch.float32
    q, k = draw(1, 3, 5, 8, seed=0, dtype=dtype), draw(1, 2, 5, 8, seed=1, dtype=dtype)
    cos, sin = (draw(1, 5, 8, seed=seed, dtype=dtype) for seed in (2, 3))
    if reason == "partial":
        cos, sin = cos[..., :1], sin[..., :1]
    if reason == "mixed precision":
        cos, sin = cos.double(), sin.double()
    monkeypatch.setattr(rotary._Rotation, "apply", None)  # a call would fail
    with fast_forms():
        found = function(q, k, cos, sin)
    for one, other in zip(found, function(q, k, cos, sin), strict=True):
        assert torch.equal(one, other)


def test_another_rotation_is_not_taken_for_this_one() -> None:
    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            half = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * cos.unsqueeze(unsqueeze_dim) + half * sin.unsqueeze(unsqueeze_dim)

        return turn(q), turn(k)

    assert not rotary._can_be_fused(interleaved)
    assert not rotary._can_be_fused(lambda q, k, cos, sin: (q, k))
    assert rotary.install(tiny_model("gpt2")) == 0
