"""Fused norms and gated units compute what the model's own do; other modules are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agilerl.models import fused_blocks
from agilerl.models.accelerate import accelerate
from agilerl.models.head import final_hidden_states
from agilerl.models.segments import Sample, choose_packer
from tests.helpers import tiny_model

IDS = torch.arange(18).view(2, 9) + 7


def results(model: Any) -> list[Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("family", "norms", "gates"),
    [("llama", 5, 2), ("gemma2", 9, 0), ("gemma3_text", 13, 0), ("qwen3", 9, 2), ("olmo2", 9, 2), ("mixtral", 5, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_logits_and_gradients(family: str, norms: int, gates: int, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype).requires_grad_(True)
    # Norms that are not at their initial value, where orders of rounding could not be told apart.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(0))
    expected = results(model)
    names = list(model.state_dict())
    assert fused_blocks.install(model) == {"norms": norms, "gated units": gates}
    assert list(model.state_dict()) == names
    limit = 5e-6 if dtype == torch.float32 else 0.04
    for found, wanted in zip(results(model), expected, strict=True):
        assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < limit


def test_a_model_in_float64_keeps_its_norms_and_is_exact() -> None:
    model = tiny_model("llama", dtype=torch.float64).requires_grad_(True)
    expected = results(model)
    assert fused_blocks.install(model) == {"norms": 0, "gated units": 2}
    for found, wanted in zip(results(model), expected, strict=True):
        assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


def test_norm_gradients_against_float64() -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weight = torch.rand(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    for offset in (0.0, 1.0):
        exact = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight + offset)
        wanted = torch.autograd.grad(exact.sin().sum(), [x, weight])
        a, b = (t.detach().float().requires_grad_() for t in (x, weight))
        out: Any = fused_blocks._RMSNorm.apply(a, b, 1e-5, offset, True)
        found = torch.autograd.grad(out.sin().sum(), [a, b])
        for f, w in zip(found, wanted, strict=True):
            assert float((f - w).norm() / w.norm()) < 1e-6


def test_gate_gradients_in_float64() -> None:
    gate, up = torch.randn(2, 5, 6, dtype=torch.float64).unbind()
    assert torch.autograd.gradcheck(fused_blocks._silu_gate, (gate.requires_grad_(), up.requires_grad_()))


class MeanNorm(nn.Module):
    """Looks like a root-mean-square norm and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class LateEpsilon(MeanNorm):
    """Adds epsilon outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3 + self.eps)


@pytest.mark.parametrize("cls", [MeanNorm, LateEpsilon])
def test_what_only_looks_like_a_norm_is_left_alone(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls())
    assert fused_blocks.install(model) == {"norms": 0, "gated units": 0}
    assert type(model[0]) is cls


def test_inference_is_the_model_s_own_bit_by_bit() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        accelerate(model)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_evaluation_in_a_micro_batch_rounds_as_training_does() -> None:
    model = tiny_model("llama")
    accelerate(model)
    packer = choose_packer(model)
    rows = [Sample(torch.arange(9) + 5, torch.ones(9)), Sample(torch.arange(4) + 8, torch.ones(4))]
    micro = packer.collate(rows, "cpu")
    with packer.running(model, micro):
        trained = final_hidden_states(model, micro.inputs)
        with torch.no_grad():
            assert torch.equal(final_hidden_states(model, micro.inputs), trained)
    with torch.no_grad():
        assert torch.allclose(model.model(micro.inputs["input_ids"][:, :9])[0], trained[:, :9], rtol=1e-5, atol=5e-6)


def test_copies_stay_fused_and_modes_are_kept() -> None:
    model = tiny_model("llama").train()
    model.lm_head.eval()
    accelerate(model)
    assert model.training
    assert not model.lm_head.training
    twin = copy.deepcopy(model)
    kinds = [type(m) for m in model.modules()]
    assert [type(m) for m in twin.modules()] == kinds
    assert sum(issubclass(kind, fused_blocks._FusedNorm) for kind in kinds) == 5
    assert accelerate(model)["norms"] == 0


def test_gated_units_keep_two_arrays() -> None:
    gate, up = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    out: Any = fused_blocks._silu_gate(gate, up)
    (operands, _), _ = out.grad_fn.next_functions
    assert len(operands.saved_tensors) == 2
    assert not out.grad_fn.saved_tensors
