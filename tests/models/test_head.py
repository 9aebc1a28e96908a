"""The head and its maps give the model's own logits, in every family and whatever sits on the head."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from agilerl.errors import ModelError
from agilerl.losses import linear_cross_entropy, token_logprobs
from agilerl.models import Adapters, attach_lora, final_hidden_states, find_head
from tests.helpers import FAMILIES, tiny_model

IDS = torch.tensor([[5, 90, 17, 33, 64, 8, 120, 71], [9, 10, 11, 12, 99, 98, 97, 96]])
ODD_ROUTES = {"llama4_text": "head_input", "modernbert-decoder": "head_input"}
MAPS = {
    "gemma2": (1.0, 3.0),
    "recurrent_gemma": (1.0, 30.0),
    "cohere": (0.25, None),
    "cohere2": (0.25, None),
    "granite": (0.5, None),
    "falcon_h1": (0.5, None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_hidden_states_is_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    head = find_head(model)
    with torch.no_grad():
        hidden = final_hidden_states(model, {"input_ids": IDS})
        logits = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(logits).all()
    assert (head.scale, head.softcap) == MAPS.get(family, (1.0, None))
    assert model._agilerl_hidden_route == ODD_ROUTES.get(family, "backbone")
    assert head.vocab_size == logits.shape[-1]


@pytest.mark.parametrize("family", ["phi", "gptj", "codegen"])
def test_a_head_with_bias_keeps_it(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_()
    head = find_head(model)
    linear = head.linear()
    assert linear is not None
    assert linear[1] is not None
    with torch.no_grad():
        hidden = final_hidden_states(model, {"input_ids": IDS})
        torch.testing.assert_close(head.logits(hidden), model(input_ids=IDS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt2"])
def test_every_dtype_is_recognised(family: str, dtype: torch.dtype) -> None:
    head = find_head(tiny_model(family, dtype=dtype))
    assert (head.scale, head.softcap) == MAPS.get(family, (1.0, None))


def test_a_softcap_is_found_even_where_the_models_logits_are_too_small_to_show_it() -> None:
    model = tiny_model("gemma2", dtype=torch.bfloat16, spread=1e-3, final_logit_softcapping=30.0)
    assert find_head(model).softcap == 30.0


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi", "llama", "gpt2", "qwen2", "qwen3"])
def test_loss_and_gradients_equal_float64_cross_entropy_on_the_models_logits(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    head = find_head(model)
    weights = torch.tensor([0.0, 1.0, 5.0, 0.3, 1.0, 0.0, 2.0], dtype=torch.float64)
    logits = model(input_ids=IDS[:1], use_cache=False).logits[0, :-1]
    wanted = (nn.functional.cross_entropy(logits.double(), IDS[0, 1:], reduction="none") * weights).sum()
    wanted.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    hidden = final_hidden_states(model, {"input_ids": IDS[:1]})[0, :-1]
    total, _ = linear_cross_entropy(hidden, head, IDS[0, 1:], weights, chunk_rows=3)
    total.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-10)
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == exact.keys()
    for name, gradient in got.items():
        assert torch.isfinite(gradient).all()
        torch.testing.assert_close(gradient, exact[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["lora", "dora", "saved_head", "saved_embedding"],
)
def test_whatever_is_adapted_on_the_head_is_trained(settings: dict, tied: bool) -> None:
    model = tiny_model("llama", dtype=torch.float64, tie_word_embeddings=tied)
    peft_model = attach_lora(model, LoraConfig(r=2, **settings), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    head = find_head(peft_model)
    targets, weights = IDS[0, 1:], torch.linspace(0.0, 2.0, 7, dtype=torch.float64)
    logits = peft_model(input_ids=IDS[:1]).logits[0, :-1]
    wanted = (nn.functional.cross_entropy(logits.double(), targets, reduction="none") * weights).sum()
    trained = {name: p for name, p in peft_model.named_parameters() if p.requires_grad}
    exact = torch.autograd.grad(wanted, list(trained.values()))
    hidden = final_hidden_states(peft_model, {"input_ids": IDS[:1]})[0, :-1]
    total, _ = linear_cross_entropy(hidden, head, targets, weights, chunk_rows=3)
    got = torch.autograd.grad(total, list(trained.values()), retain_graph=True)
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-10)
    for name, gradient, reference in zip(trained, got, exact, strict=True):
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)
    picked = token_logprobs(hidden, head, targets, chunk_rows=2)
    torch.testing.assert_close(picked, logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1))


def test_finding_the_head_changes_nothing() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    find_head(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.layers[0].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_the_active_adapter_is_what_the_hidden_states_come_from() -> None:
    model = attach_lora(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]), seed=0)
    adapters = Adapters(model)
    with torch.no_grad():
        for tensor in adapters.read("actor").values():
            tensor.normal_()
        adapted = final_hidden_states(model, {"input_ids": IDS})
        with adapters.disabled():
            plain = final_hidden_states(model, {"input_ids": IDS})
    assert not torch.allclose(adapted, plain)


class Shifted(nn.Module):
    """Stands for a map that the head knows nothing about."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def test_an_unknown_map_after_the_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def shifted(self: nn.Module, *args: object, **kwargs: object) -> object:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output

    monkeypatch.setattr(type(model), "forward", shifted)
    with pytest.raises(ModelError, match="LlamaForCausalLM are not its head's output"):
        find_head(model)


def test_a_head_that_is_bypassed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def bypassing(self: nn.Module, *args: object, **kwargs: object) -> object:
        head, self.lm_head = self.lm_head, Shifted(self.lm_head)
        self.get_output_embeddings = lambda: head
        weight = head.weight
        head_forward, head.forward = head.forward, lambda hidden: hidden @ weight.t()
        try:
            self.lm_head.forward = lambda hidden: hidden @ weight.t()
            return forward(self, *args, **kwargs)
        finally:
            self.lm_head, head.forward = head, head_forward

    monkeypatch.setattr(type(model), "forward", bypassing)
    with pytest.raises(ModelError, match="does not call its output embedding once"):
        find_head(model)


def test_a_model_without_a_language_head_is_refused() -> None:
    backbone = tiny_model("llama").model
    with pytest.raises(ModelError, match="LlamaModel has no language-model head"):
        find_head(backbone)


def test_weights_that_are_not_finite_are_named_as_such() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        find_head(model)
