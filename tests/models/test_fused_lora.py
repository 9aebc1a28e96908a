"""Fused LoRA layers equal PEFT's own, and give way to it wherever they are not plain."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agilerl import hardware
from agilerl.models import dropout, fused_lora, halves
from agilerl.models.fused_lora import FusedLoraLinear
from agilerl.models.share import share_base
from tests.helpers import tiny_model

IN, OUT, RANK = 12, 20, 3


def layer(rate: float = 0.0, *, dtype: torch.dtype = torch.float64, bias: bool = True, **options: Any) -> Any:
    """A LoRA layer with both factors random, its scale no power of two."""
    torch.manual_seed(0)
    base = nn.Sequential()
    base.add_module("target", nn.Linear(IN, OUT, bias=bias, dtype=dtype))
    config = LoraConfig(r=RANK, lora_alpha=7, target_modules=["target"], lora_dropout=rate, **options)
    model = get_peft_model(base, config)  # type: ignore[arg-type]
    module = model.base_model.model.target
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=dtype)
    return module.train()


@contextmanager
def fixed_dropout(module: Any, kept: Tensor) -> Iterator[None]:
    """PEFT's dropout with a given mask."""
    rate = getattr(module.lora_dropout["default"], "p", 0.0)  # no dropout at all is an Identity
    module.lora_dropout["default"].forward = lambda x: x * kept.to(x.dtype) / (1 - rate)
    try:
        yield
    finally:
        del module.lora_dropout["default"].forward


def results(module: Any, x: Tensor, slope: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    out = module(x)
    grads = torch.autograd.grad(out, wanted, slope, allow_unused=True)  # a merged layer does not use its factors
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, IN, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(2, 5, OUT, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.15, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained_base", [True, False])
def test_equals_peft_with_the_same_dropped_elements(
    rate: float, bias: bool, trained_base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layer(rate, bias=bias)
    module.base_layer.requires_grad_(trained_base)
    x, slope = inputs()
    flat = x.reshape(-1, IN)
    dropped = dropout.draw_dropped(flat, rate) if rate else torch.zeros(flat.shape, dtype=torch.bool)
    kept = dropout.zero_dropped_(torch.ones_like(flat), dropped).view(x.shape)
    with fixed_dropout(module, kept):
        expected = results(module, x, slope)
    assert fused_lora.install(module) == 1
    monkeypatch.setattr(fused_lora, "draw_dropped", lambda *_: dropped)
    assert module._plain_adapter(x) == "default"
    found = results(module, x, slope)
    assert len(found) == len(expected) == 4 + trained_base * (1 + bias)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-12


def test_nothing_is_computed_that_is_not_wanted() -> None:
    module = layer()
    fused_lora.install(module)
    x, slope = inputs()
    out = module(x)  # x needs no gradient, as in a model's first layer; neither does the base
    out.backward(slope)
    assert module.base_layer.weight.grad is None
    assert module.lora_A["default"].weight.grad is not None


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_gradient_checkpointing_drops_the_same_elements(rate: float) -> None:
    module = layer(rate)
    fused_lora.install(module)
    x, slope = inputs()
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        y = x.clone().requires_grad_()
        out = checkpoint(module, y, use_reentrant=False) if again else module(y)
        found.append([out.detach(), *torch.autograd.grad(out, [y, *module.lora_A.parameters()], slope)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dropout_is_off_in_evaluation_and_on_in_training() -> None:
    module = layer(0.15)
    fused_lora.install(module)
    x, _ = inputs()
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("wide", [False, True])
def test_float32_factors_over_a_half_precision_base(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (fused_lora, halves):
        monkeypatch.setattr(where, "is_better_wide", lambda t: wide and t.dtype == torch.bfloat16)
    exact = layer()
    x, slope = inputs()
    x, slope = x.bfloat16(), slope.bfloat16()
    exact.base_layer.to(torch.bfloat16).to(torch.float64)
    expected = results(exact, x.double(), slope.double())
    module = copy.deepcopy(exact)
    module.base_layer.to(torch.bfloat16)
    module.lora_A.to(torch.float32)
    module.lora_B.to(torch.float32)
    peft = results(module, x, slope)
    fused_lora.install(module)
    assert module._plain_adapter(x) == "default"
    found = results(module, x, slope)
    for a, p, e in zip(found, peft, expected, strict=True):
        assert a.dtype == p.dtype
        error, own = ((t.double() - e).norm() / e.norm() for t in (a, p))
        assert float(error) < max(3 * float(own), 0.006)  # one rounding to bfloat16 is up to 0.004


def disabled(module: Any) -> None:
    module.enable_adapters(False)


def merged(module: Any) -> None:
    module.merge()


def hooked(module: Any) -> None:
    module.lora_B["default"].register_forward_hook(lambda *_: None)


def two(module: Any) -> None:
    module.update_layer("other", RANK, 7, LoraConfig(r=RANK, lora_alpha=7, init_lora_weights=False))
    module.lora_A["other"].double()
    module.lora_B["other"].double()
    module.set_adapter(["default", "other"])


@pytest.mark.parametrize("change", [disabled, merged, hooked, two])
def test_other_cases_are_left_to_peft(change: Any) -> None:
    module = layer()
    change(module)
    x, slope = inputs()
    expected = results(module, x, slope)
    fused_lora.install(module)
    assert module._plain_adapter(x) is None
    for a, b in zip(results(module, x, slope), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_are_left_to_peft(options: dict[str, Any]) -> None:
    module = layer(**options)
    x, slope = inputs()
    expected = results(module, x, slope)
    fused_lora.install(module)
    assert module._plain_adapter(x) is None
    for a, b in zip(results(module, x, slope), expected, strict=True):
        assert torch.equal(a, b)


def test_inference_is_peft_s_own_bit_by_bit() -> None:
    module = layer(dtype=torch.float32).eval()
    x, _ = inputs(torch.float32)
    with torch.no_grad():
        expected = module(x)
        fused_lora.install(module)
        assert torch.equal(module(x), expected)


def test_a_model_keeps_its_names_merges_and_shares(tmp_path: Any) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(tiny_model("llama", dtype=torch.float64), config).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    names, ids = list(model.state_dict()), torch.arange(9)[None] + 5
    before = model(input_ids=ids).logits
    assert fused_lora.install(model) == fused_lora.install(model) == 14
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    twin = share_base(model)
    twins = [m for m in twin.modules() if isinstance(m, FusedLoraLinear)]
    assert len(twins) == 14
    mine = [m for m in model.modules() if isinstance(m, FusedLoraLinear)]
    assert all(a.base_layer.weight is b.base_layer.weight for a, b in zip(mine, twins, strict=True))
    twins[0].lora_B["default"].weight.data.zero_()
    assert torch.allclose(model(input_ids=ids).logits, before, rtol=1e-12)
    assert not torch.allclose(twin(input_ids=ids).logits, before, rtol=1e-3)
    merged_model = model.merge_and_unload()
    assert torch.allclose(merged_model(input_ids=ids).logits, before, rtol=1e-10)


# --- dropout by position --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.2, 0.5])
def test_elements_are_dropped_independently_at_the_rate(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(400, 500)
    kept = dropout.zero_dropped_(x.clone(), dropout.draw_dropped(x, rate))
    lost = 1 - kept.double()
    deviation = math.sqrt(rate * (1 - rate) / x.numel())
    assert abs(float(lost.mean()) - rate) < 5 * deviation
    flat = lost.flatten()
    for gap in (1, 2, 7, 500):
        both = float((flat[gap:] * flat[:-gap]).mean())
        assert abs(both - rate**2) < 6 * math.sqrt(rate**2 / x.numel()) + 6 * rate * deviation
    ends = lost[:, [0, -1]].mean(0)
    assert float((ends - rate).abs().max()) < 6 * math.sqrt(rate * (1 - rate) / 400)


def test_positions_are_ascending_inside_and_follow_the_global_generator() -> None:
    x = torch.ones(64, 33)
    torch.manual_seed(5)
    one, other = dropout.draw_dropped(x, 0.05), dropout.draw_dropped(x, 0.05)
    torch.manual_seed(5)
    assert torch.equal(dropout.draw_dropped(x, 0.05), one)
    assert not torch.equal(one, other)
    assert bool((one[1:] > one[:-1]).all())
    assert int(one[0]) >= 0
    assert int(one[-1]) < x.numel()


def test_a_short_first_draw_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(100, 100)
    rounds: list[float] = []

    def too_few(mean: float) -> int:
        rounds.append(mean)
        return int(mean / 2) + 1

    monkeypatch.setattr(dropout, "_enough", too_few)
    torch.manual_seed(0)
    dropped = dropout.draw_dropped(x, 0.1)
    assert len(rounds) > 1
    assert 800 < len(dropped) < 1200
    assert int(dropped[-1]) > 9900


def test_nothing_to_drop() -> None:
    assert dropout.draw_dropped(torch.ones(0, 4), 0.1).numel() == 0


# --- products of half precision -------------------------------------------------------------------------------------------


def test_wide_products_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)).bfloat16()
    assert halves.install(model) == 2
    assert halves.install(model) == 0
    x = torch.randn(3, 4, IN).bfloat16().requires_grad_()
    first = model[0]
    out = first(x)
    wide = torch.nn.functional.linear(x.float(), first.weight.float(), first.bias.float())
    assert torch.equal(out, wide.bfloat16())
    slope = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, first.weight, first.bias], slope)
    exact = torch.autograd.grad(wide, [x, first.weight, first.bias], slope.float())
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a, b)


def test_frozen_products_keep_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: False)
    module = nn.Linear(IN, OUT, bias=False).bfloat16().requires_grad_(False)
    halves.install(nn.Sequential(module))
    out = module(torch.randn(4, IN).bfloat16().requires_grad_())
    assert out.grad_fn is not None
    assert [None if t is None else t.shape for t in out.grad_fn.saved_tensors] == [None, module.weight.shape]  # type: ignore[attr-defined]


def test_processors_with_such_products_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_has_products", lambda _: True)
    assert halves.install(nn.Sequential(nn.Linear(2, 2).bfloat16())) == 0
    assert not hardware.is_better_wide(torch.ones(1))
