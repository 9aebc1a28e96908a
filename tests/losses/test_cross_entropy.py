"""Loss and every gradient against float64 cross-entropy on the full logits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from agilerl.losses import TokenSum, default_chunk_rows, keeping_tile, linear_cross_entropy, token_logprobs

N, H, V = 11, 8, 37


@dataclass
class ToyHead:
    """A head as losses see it; ``plain=False`` hides the linear layer, as an adapter on it would."""

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    plain: bool = True

    @property
    def vocab_size(self) -> int:
        return self.module.out_features

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.module.weight, self.module.bias) if self.plain else None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.module(hidden) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def toy(*, bias: bool = False, trained: bool = False, dtype: torch.dtype = torch.float64, **maps: object) -> ToyHead:
    module = nn.Linear(H, V, bias=bias)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return ToyHead(module.to(dtype).requires_grad_(trained), **maps)  # type: ignore[arg-type]


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, torch.randint(0, V, (N,), generator=generator)


def reference(hidden: Tensor, head: ToyHead, targets: Tensor, weights: Tensor) -> Tensor:
    nll = nn.functional.cross_entropy(head.logits(hidden).double(), targets, reduction="none")
    return (nll * weights.double()).sum()


def gradients(value: Tensor, hidden: Tensor, head: ToyHead) -> list[Tensor]:
    wanted = [hidden, *(p for p in head.module.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(value, wanted))


WEIGHTS = {
    "zero_one_five": torch.tensor([0.0, 1.0, 5.0] * 4)[:N],
    "fractional": torch.linspace(0.05, 1.7, N),
    "one": torch.ones(N),
    "negative_too": torch.linspace(-1.0, 1.0, N),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": True}, {"scale": 0.25}, {"softcap": 2.0}, {"bias": True, "scale": 3.0, "softcap": 1.5}],
    ids=["plain", "bias", "scale", "softcap", "all"],
)
@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
def test_loss_and_all_gradients_are_exact(plain: bool, settings: dict, trained: bool, weights: Tensor) -> None:
    head = toy(trained=trained, plain=plain, **settings)
    hidden, targets = rows()
    wanted = reference(hidden, head, targets, weights)
    wanted_gradients = gradients(wanted, hidden, head)
    for chunk_rows in (*range(1, N + 1), 100, None):
        total, weight = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=chunk_rows)
        torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
        assert weight.item() == pytest.approx(weights.double().sum().item(), abs=1e-12)
        assert not weight.requires_grad
        for got, exact in zip(gradients(total, hidden, head), wanted_gradients, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
def test_the_incoming_gradient_scales_everything(plain: bool) -> None:
    head = toy(trained=True, bias=True, plain=plain)
    hidden, targets = rows()
    weights = WEIGHTS["fractional"]
    wanted = gradients(reference(hidden, head, targets, weights) / 7.0, hidden, head)
    total, _ = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=4)
    for got, exact in zip(gradients(total / 7.0, hidden, head), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
@pytest.mark.parametrize("settings", [{}, {"bias": True, "scale": 3.0, "softcap": 1.5}], ids=["plain", "all"])
def test_token_logprobs_are_exact(plain: bool, settings: dict) -> None:
    head = toy(trained=True, plain=plain, **settings)
    hidden, targets = rows()
    mix = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    wanted = head.logits(hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    wanted_gradients = gradients((wanted * mix).sum(), hidden, head)
    for chunk_rows in (1, 3, N, None):
        got = token_logprobs(hidden, head, targets, chunk_rows=chunk_rows)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        for gradient, exact in zip(gradients((got * mix).sum(), hidden, head), wanted_gradients, strict=True):
            torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-10)


def test_a_tied_head_gets_its_gradient_from_both_ends() -> None:
    embedding = nn.Embedding(V, H, dtype=torch.float64)
    head = toy(trained=True)
    head.module.weight = embedding.weight
    _, targets = rows()
    ids = torch.arange(N) % V
    weights = WEIGHTS["fractional"]
    wanted = torch.autograd.grad(reference(embedding(ids).tanh(), head, targets, weights), [embedding.weight])[0]
    total, _ = linear_cross_entropy(embedding(ids).tanh(), head, targets, weights, chunk_rows=4)
    torch.testing.assert_close(torch.autograd.grad(total, [embedding.weight])[0], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
def test_no_rows_is_a_zero_with_a_backward_pass(plain: bool) -> None:
    head = toy(trained=True, plain=plain)
    hidden = torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    total, weight = linear_cross_entropy(hidden, head, empty, empty.double())
    assert (total.item(), weight.item()) == (0.0, 0.0)
    total.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, H)
    assert token_logprobs(hidden, head, empty).shape == (0,)


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
def test_without_gradients_nothing_is_kept(plain: bool) -> None:
    head = toy(trained=True, plain=plain)
    hidden, targets = rows()
    weights = WEIGHTS["one"]
    wanted = reference(hidden, head, targets, weights)
    total, _ = linear_cross_entropy(hidden, head, targets, weights, need_grad=False, chunk_rows=2)
    torch.testing.assert_close(total, wanted)
    with torch.no_grad():
        total, _ = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=2)
    torch.testing.assert_close(total, wanted)
    assert not total.requires_grad


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
def test_bfloat16_stays_close_to_float32(plain: bool) -> None:
    head = toy(trained=True, bias=True, dtype=torch.bfloat16, plain=plain)
    hidden, targets = rows(torch.bfloat16)
    weights = WEIGHTS["fractional"]
    exact_head = toy(trained=True, bias=True)
    exact_head.module.load_state_dict({k: v.double() for k, v in head.module.state_dict().items()})
    exact_hidden = hidden.detach().double().requires_grad_()
    wanted = reference(exact_hidden, exact_head, targets, weights)
    total, weight = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=3)
    assert (total.dtype, weight.dtype) == (torch.float32, torch.float32)
    assert total.item() == pytest.approx(wanted.item(), rel=1e-2)
    for got, exact in zip(
        gradients(total / 3, hidden, head), gradients(wanted / 3, exact_hidden, exact_head), strict=True
    ):
        assert got.dtype == torch.bfloat16
        error = (got.double() - exact).norm() / exact.norm()
        assert error < 1e-2


def test_a_bfloat16_gradient_is_scaled_in_full_precision() -> None:
    head = toy(dtype=torch.bfloat16)
    hidden, targets = rows(torch.bfloat16)
    one, _ = linear_cross_entropy(hidden, head, targets, WEIGHTS["one"])
    unscaled = torch.autograd.grad(one, [hidden], retain_graph=True)[0]
    factor = 1.0 / 3.0  # rounds up by 2e-3 in bfloat16
    scaled = torch.autograd.grad(one * factor, [hidden])[0]
    torch.testing.assert_close(scaled, (unscaled.float() * factor).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", ["loss", "logprobs"])
def test_tiles_that_share_arrays_give_the_same_bits(function: str, dtype: torch.dtype) -> None:
    head = toy(dtype=dtype, trained=True, bias=True, softcap=3.0)
    results = []
    for kept in (False, True):
        hidden, targets = rows(dtype)
        with keeping_tile() if kept else nullcontext():
            for size in (3, 4):  # tiles of several sizes, the later ones larger
                if function == "loss":
                    value = linear_cross_entropy(hidden, head, targets, torch.ones(N), chunk_rows=size).total
                else:
                    value = token_logprobs(hidden, head, targets, chunk_rows=size).sum()
                results.append([value.detach(), *gradients(value, hidden, head)])
    for alone, shared in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_infinities_and_nans_are_not_hidden() -> None:
    head = toy()
    hidden, targets = rows()
    with torch.no_grad():
        hidden[4, 0] = float("nan")
    total, _ = linear_cross_entropy(hidden, head, targets, WEIGHTS["one"], chunk_rows=3)
    assert torch.isnan(total)


def test_dropout_in_the_head_is_the_same_forward_and_backward() -> None:
    class Dropping(ToyHead):
        def logits(self, hidden: Tensor) -> Tensor:
            return self.module(nn.functional.dropout(hidden, 0.5, training=True))

    plain = toy(trained=True)
    head = Dropping(plain.module, plain=False)
    hidden, targets = rows()
    weights = WEIGHTS["one"]
    torch.manual_seed(0)
    wanted = gradients(reference(hidden, head, targets, weights), hidden, head)
    torch.manual_seed(0)
    total, _ = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=N)
    for got, exact in zip(gradients(total, hidden, head), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_the_default_tile_shrinks_with_the_vocabulary() -> None:
    sizes = [default_chunk_rows(vocab) for vocab in (1, 1000, 50_000, 150_000, 10**9)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 1
    assert default_chunk_rows(150_000) * 150_000 <= 1 << 24


@pytest.mark.parametrize("plain", [True, False], ids=["linear", "module"])
@pytest.mark.parametrize("function", ["loss", "logprobs"])
def test_the_logits_are_never_whole(plain: bool, function: str) -> None:
    """No tensor of more than a few tiles is made, and none of that size is kept for the backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for item in result if isinstance(result, tuple | list) else (result,):
                if isinstance(item, Tensor):
                    self.elements = max(self.elements, item.numel())
            return result

    vocab, count, chunk = 512, 256, 16
    module = nn.Linear(4, vocab, bias=False).requires_grad_(False)
    head = ToyHead(module, plain=plain)
    hidden = torch.randn(count, 4, requires_grad=True)
    targets = torch.zeros(count, dtype=torch.long)
    with Largest() as seen:
        if function == "loss":
            value: TokenSum | Tensor = linear_cross_entropy(hidden, head, targets, torch.ones(count), chunk_rows=chunk)
            value = value.total
        else:
            value = token_logprobs(hidden, head, targets, chunk_rows=chunk).sum()
        value.backward()
    assert seen.elements <= chunk * vocab
    assert seen.elements < count * vocab / 8
