"""Every path gives the loss and gradients of float64 cross-entropy on each row run alone, whatever the family."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl.models.head import final_hidden_states, find_head
from agilerl.models.segments import Packer, Sample, choose_packer
from tests.helpers import random_rows, tiny_model

LENGTHS = [13, 1, 9, 16, 4]

PACKED = [
    "llama", "mistral", "qwen2", "qwen2_sliding", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2",
    "gptj", "codegen", "gpt_neox", "gpt_bigcode", "olmo", "olmo2", "olmo3", "cohere", "cohere2", "granite", "stablelm",
    "starcoder2", "opt", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "smollm3", "nemotron", "glm4",
    "deepseek_v3", "biogpt", "modernbert-decoder",
]  # fmt: skip
NATIVE = ["falcon", "falcon_alibi", "llama4_text", "gpt_neo"]
PADDED = ["bloom", "mpt", "mamba", "mamba2", "rwkv", "lfm2", "qwen3_next", "jamba", "falcon_h1", "recurrent_gemma"]
# Families whose own code computes a norm, the router or the scores in float32 even in a float64 model.
LOOSE = dict.fromkeys(
    [*PADDED, "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "deepseek_v3", "gpt_neo", "llama4_text"], 1e-5
)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(7)
    return [
        Sample(row, torch.rand(len(row), generator=generator, dtype=torch.float64).round(decimals=1))
        for row in random_rows(LENGTHS)
    ]


def alone(model: torch.nn.Module, rows: list[Sample]) -> Tensor:
    """Weighted sum of the NLL of the model's own logits, each row without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if len(row.ids) > 1:
            logits = model(input_ids=row.ids[None], use_cache=False).logits[0, :-1].double()
            total = total + (F.cross_entropy(logits, row.ids[1:], reduction="none") * row.weights[1:]).sum()
    return total


def together(model: torch.nn.Module, packer: Packer, rows: list[Sample]) -> tuple[Tensor, list[Tensor | None]]:
    head = find_head(model)
    micro = packer.collate(rows, "cpu")
    with packer.running(model, micro):
        hidden = final_hidden_states(model, micro.inputs).flatten(0, 1)[micro.predict_from]
        nll = F.cross_entropy(head.logits(hidden), micro.targets, reduction="none")
        total = (nll * micro.weights).sum()
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return total.detach(), list(gradients)


def worst(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Largest difference, absolute or relative to the largest entry; infinite where anything is not finite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            return float("inf")
        largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp_min(1.0)))
    return largest


@pytest.mark.parametrize("family", [*PACKED, *NATIVE, *PADDED])
def test_chosen_and_padded_paths_equal_each_row_alone(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64).requires_grad_(True)
    rows = samples()
    chosen = choose_packer(model)
    expected_path = "packed" if family in PACKED else "native" if family in NATIVE else "padded"
    assert chosen.path == expected_path, chosen.reason
    reference = alone(model, rows)
    expected = list(torch.autograd.grad(reference, list(model.parameters()), allow_unused=True))
    implementation = model.config._attn_implementation
    tolerance = LOOSE.get(family, 1e-10)
    for packer in (chosen, choose_packer(model, prefer="padded")):
        total, gradients = together(model, packer, rows)
        assert torch.isfinite(total)
        assert abs(float(total / reference.detach()) - 1) <= tolerance, packer.path
        assert worst(gradients, expected) <= tolerance, packer.path
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_stay_apart_whatever_attention_the_model_was_loaded_with(attention: str) -> None:
    rows = samples()
    exact = tiny_model("llama", dtype=torch.float64, attention="sdpa").requires_grad_(True)
    expected = list(torch.autograd.grad(alone(exact, rows), list(exact.parameters()), allow_unused=True))
    model = tiny_model("llama", dtype=torch.float64, attention=attention).requires_grad_(True)
    for path in ("packed", "padded"):
        packer = choose_packer(model, prefer=path if path == "padded" else None)
        assert packer.path == path
        total, gradients = together(model, packer, rows)
        assert torch.isfinite(total)
        # The eager attention of transformers takes its softmax in float32, and padded rows run through it.
        assert worst(gradients, expected) <= (2e-6 if (path, attention) == ("padded", "eager") else 1e-10), path
    assert model.config._attn_implementation == attention
