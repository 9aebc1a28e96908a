"""Attention on a processor: in float32 where half precision is slow, and not repeated where a block is recomputed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl import hardware
from agilerl.models import cpu_attention
from agilerl.models.cpu_attention import attention

MASKS = {
    "causal": None,
    "windowed": torch.ones(9, 9, dtype=torch.bool).tril().triu(-3),
    "continued": torch.ones(4, 9, dtype=torch.bool).tril(5),
}


def draw(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, 6), (9, 2), (9, 2))
    drawn = [torch.randn(1, *size, 16, generator=generator).transpose(1, 2).bfloat16() for size in sizes]
    return [t.requires_grad_() for t in drawn]


def attend(inputs: list[Tensor], mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("has_products", [False, True], ids=["none", "tiled"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_attention_is_at_least_as_exact_and_keeps_nothing_wide(
    mask: Tensor | None, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: has_products)
    monkeypatch.setattr(cpu_attention, "is_slow_to_start", lambda _: has_products)
    inputs = draw(9 if mask is None else mask.shape[0])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = attention(*inputs, mask, 0.3)
        assert out is not None
        assert all(t.dtype == torch.bfloat16 for t in kept if t.ndim == 4)
        assert sum(t.dtype == torch.bfloat16 for t in kept) == 4
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(out, inputs, slope)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = attend(doubles, mask)
    exact_grads = torch.autograd.grad(exact, doubles, slope.double())
    plain = attend(inputs, mask)
    plain_grads = torch.autograd.grad(plain, inputs, slope)
    for mine, theirs, right in zip((out, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, right) <= max(1.2 * error(theirs, right), 0.004)  # one rounding is up to 0.004


def test_where_products_are_tiled_only_a_short_backward_pass_is_computed_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: True)
    monkeypatch.setattr(cpu_attention, "is_slow_to_start", lambda _: True)
    inputs = draw(9)
    out = attention(*inputs, None, 0.3)
    assert out is not None
    assert torch.equal(out, attend(inputs, None))
    with torch.no_grad():
        assert attention(*inputs, None, 0.3) is None
    assert attention(*(t.detach() for t in inputs), None, 0.3) is None
    monkeypatch.setattr(cpu_attention, "_FEW_KEYS", 8)
    assert attention(*inputs, None, 0.3) is None


def test_attention_is_left_alone_where_the_processor_has_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: True)
    monkeypatch.setattr(cpu_attention, "is_slow_to_start", lambda _: False)
    assert attention(*draw(9), None, 0.3) is None
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: False)
    assert attention(*(t.float() for t in draw(9)), None, 0.3) is None
