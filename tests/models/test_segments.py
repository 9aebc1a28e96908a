"""Micro-batches: what is planned, what is built, and that a model stays an ordinary one."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from agilerl.errors import ConfigError, DataError, ModelError
from agilerl.models import attention, varlen
from agilerl.models.head import final_hidden_states, find_head
from agilerl.models.segments import MicroBatch, Packer, Sample, choose_packer
from tests.helpers import random_rows, tiny_model

PACKED = Packer(path="packed", reason="", token_budget=20)
PADDED = Packer(path="padded", reason="", token_budget=20)


def sample(length: int, weight: float = 1.0, start: int = 10) -> Sample:
    return Sample(torch.arange(start, start + length), torch.full((length,), weight))


# --- plan ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packer", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("max_rows", [None, 1, 2, 3, 8, 100])
@pytest.mark.parametrize("budget", [None, 1, 16, 33, 1000])
def test_plan_uses_every_row_once_within_its_limits(packer: Packer, max_rows: int | None, budget: int | None) -> None:
    lengths = [3, 30, 7, 7, 1, 16, 2, 9, 9, 4]
    plan = packer.plan(lengths, max_rows, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    assert plan == packer.plan(lengths, max_rows, budget)
    limit = packer.token_budget if budget is None and max_rows is None else budget
    for rows in plan:
        assert max_rows is None or len(rows) <= max_rows
        held = [lengths[i] for i in rows]
        cells = max(held) * len(held) if packer.path == "padded" else sum(held)
        assert limit is None or len(rows) == 1 or cells <= limit


def test_packed_plan_makes_as_few_and_as_even_micro_batches_as_rows_allow() -> None:
    lengths = [100, 90, 10, 5, 50, 45, 1, 99]
    plan = PACKED.plan(lengths, 4)
    loads = [sum(lengths[i] for i in rows) for rows in plan]
    assert len(plan) == 2
    assert max(loads) - min(loads) <= 10
    assert loads == sorted(loads, reverse=True)


def test_padded_plan_puts_rows_of_like_length_together() -> None:
    assert PADDED.plan([5, 1, 6, 2], 2) == [[2, 0], [3, 1]]


def test_plan_of_nothing_is_nothing() -> None:
    assert PACKED.plan([], None) == PADDED.plan([], 4) == []


@pytest.mark.parametrize("limits", [(0, None), (None, 0), (-1, None)])
def test_plan_refuses_sizes_below_one(limits: tuple[int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        PACKED.plan([3], *limits)


# --- collate ------------------------------------------------------------------------------------------------------------


def test_packed_micro_batch_holds_real_tokens_only() -> None:
    rows = [sample(3), Sample(torch.tensor([20, 21]), torch.tensor([5.0, 0.5])), sample(1)]
    micro = PACKED.collate(rows, "cpu")
    assert micro.inputs["input_ids"].tolist() == [[10, 11, 12, 20, 21, 10]]
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert "attention_mask" not in micro.inputs
    assert micro.predict_from.tolist() == [0, 1, 3]
    assert micro.targets.tolist() == [11, 12, 21]
    assert micro.weights.tolist() == [1.0, 1.0, 0.5]
    assert micro.rows.tolist() == [0, 0, 1]
    assert (micro.num_rows, micro.num_tokens, micro.num_cells, micro.lengths) == (3, 6, 6, (3, 2, 1))


def test_padded_micro_batch_is_padded_on_the_right() -> None:
    micro = PADDED.collate([sample(1), sample(3)], "cpu")
    assert micro.inputs["input_ids"].tolist() == [[10, 0, 0], [10, 11, 12]]
    assert micro.inputs["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert micro.predict_from.tolist() == [3, 4]
    assert micro.rows.tolist() == [1, 1]
    assert (micro.num_rows, micro.num_tokens, micro.num_cells) == (2, 4, 6)


def test_first_token_of_a_row_and_weight_zero_are_no_targets() -> None:
    micro = PACKED.collate([Sample(torch.tensor([7, 8, 9]), torch.tensor([1.0, 0.0, -2.0]))], "cpu")
    assert micro.targets.tolist() == [9]
    assert micro.weights.tolist() == [-2.0]


@pytest.mark.parametrize("packer", [PACKED, PADDED], ids=["packed", "padded"])
def test_no_samples_give_a_micro_batch_of_weight_zero(packer: Packer) -> None:
    micro = packer.collate([], "cpu")
    assert micro.targets.numel() == micro.weights.numel() == micro.rows.numel() == 0
    assert micro.num_rows == micro.num_tokens == 0
    model = tiny_model()
    with packer.running(model, micro):
        hidden = final_hidden_states(model, micro.inputs).flatten(0, 1)[micro.predict_from]
        hidden.sum().backward()
    assert all(p.grad is None or float(p.grad.abs().sum()) == 0 for p in model.parameters())


@pytest.mark.parametrize("bad", [Sample(torch.arange(3), torch.ones(2)), Sample(torch.arange(0), torch.ones(0))])
def test_misshapen_samples_are_refused(bad: Sample) -> None:
    with pytest.raises(DataError, match="Sample 1"):
        PACKED.collate([sample(2), bad], "cpu")


def test_extras_go_with_the_tokens_or_are_joined() -> None:
    rows = [
        Sample(torch.arange(2), torch.ones(2), {"token_type_ids": torch.tensor([0, 1]), "pixels": torch.ones(1, 4)}),
        Sample(
            torch.arange(3), torch.ones(3), {"token_type_ids": torch.tensor([1, 1, 1]), "pixels": torch.zeros(2, 4)}
        ),
    ]
    padded = PADDED.collate(rows, "cpu")
    assert padded.inputs["token_type_ids"].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert padded.inputs["pixels"].shape == (3, 4)
    missing = [Sample(torch.arange(2), torch.ones(2), {"depth": torch.tensor([0, 1])}), sample(3)]
    with pytest.raises(DataError, match="depth"):
        PADDED.collate(missing, "cpu")


def test_inputs_that_may_bring_positions_or_masks_are_not_packed() -> None:
    typed = Sample(torch.arange(2), torch.ones(2), {"token_type_ids": torch.tensor([0, 1])})
    micro = PACKED.collate([typed, sample(3)], "cpu")
    assert micro.inputs["token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]  # rows without types are text
    assert micro.lengths == ()
    assert "position_ids" not in micro.inputs
    plain = Sample(torch.arange(2), torch.ones(2), {"pixel_values": torch.ones(1, 3, 4, 4)})
    assert PACKED.collate([plain, sample(3)], "cpu").lengths == (2, 3)


def test_extras_that_some_rows_lack_are_joined_from_the_others() -> None:
    rows = [sample(2), Sample(torch.arange(3), torch.ones(3), {"pixels": torch.zeros(2, 4)})]
    assert PADDED.collate(rows, "cpu").inputs["pixels"].shape == (2, 4)


def test_padded_extras_reach_an_empty_row_set() -> None:
    assert set(PADDED.collate([], "cpu").inputs) == {"input_ids", "attention_mask", "position_ids"}


# --- choose -------------------------------------------------------------------------------------------------------------


def test_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="agilerl.models.probe"):
        packer = choose_packer(tiny_model())
    assert packer.path == "packed"
    assert [r.message for r in caplog.records] == [f"Micro-batches take the packed path: {packer.reason}."]


def test_choosing_leaves_mode_and_random_state_alone() -> None:
    model = tiny_model().train()
    model.lm_head.eval()
    state = torch.get_rng_state()
    choose_packer(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.lm_head.training


def test_column_positions_keep_the_padded_path() -> None:
    packer = choose_packer(tiny_model(), positions_from_mask=False)
    assert packer.path == "padded"
    assert "calc_position_embeddings" in packer.reason
    assert "position_ids" not in packer.collate([sample(3)], "cpu").inputs


def test_unknown_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="packed, native, padded"):
        choose_packer(tiny_model(), prefer="fast")


def test_a_leak_between_samples_is_found() -> None:
    model = tiny_model("llama")
    original = model.model.layers[0].mlp.forward
    # A mixer over neighbouring positions, such as the convolutions of hybrid models.
    model.model.layers[0].mlp.forward = lambda x: original(x + x.roll(1, 1) * (torch.arange(x.shape[1]) > 0)[:, None])
    packer = choose_packer(model)
    assert packer.path == "padded"
    assert "alone" in packer.reason


def test_a_layer_that_ignores_the_attention_interface_is_found() -> None:
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3
    packer = choose_packer(model)
    assert packer.path == "native"
    assert "2 of 3 layers" in packer.reason


def test_budget_depends_on_the_model_only() -> None:
    small, large = tiny_model("llama"), tiny_model("llama", hidden_size=64, num_hidden_layers=4)
    assert choose_packer(small).token_budget == choose_packer(tiny_model("llama", seed=5)).token_budget
    assert choose_packer(large).token_budget <= choose_packer(small).token_budget


# --- running ------------------------------------------------------------------------------------------------------------


def gradients(model: Any, micro: MicroBatch, packer: Packer) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    head = find_head(model)
    with packer.running(model, micro):
        hidden = final_hidden_states(model, micro.inputs).flatten(0, 1)[micro.predict_from]
        loss = F.cross_entropy(head.logits(hidden), micro.targets, reduction="sum")
        loss.backward()
    return [p.grad.clone() for p in parameters if p.grad is not None]


def checkpointing(model: Any, reentrant: bool) -> None:
    # The newer name where there is one: the older warns then.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    enable({"use_reentrant": reentrant})


def samples() -> list[Sample]:
    return [Sample(row, torch.ones(len(row))) for row in random_rows([9, 3, 14])]


def test_outside_of_running_the_model_is_an_ordinary_one() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    packer = choose_packer(model)
    rows = random_rows([6, 4])
    ids = torch.zeros(2, 6, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):  # padding on the left
        ids[i, 6 - len(row) :], mask[i, 6 - len(row) :] = row, 1

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            return [
                model(input_ids=ids, attention_mask=mask, labels=ids).loss,
                model(input_ids=rows[0][None]).logits,
                model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
            ]

    before = outputs()
    gradients(model, packer.collate(samples(), "cpu"), packer)
    assert model.config._attn_implementation == "sdpa"
    for a, b in zip(before, outputs(), strict=True):
        assert torch.equal(a, b)


def test_an_error_inside_running_restores_the_model() -> None:
    model = tiny_model()
    packer = choose_packer(model)
    micro = packer.collate(samples(), "cpu")
    with pytest.raises(KeyError), packer.running(model, micro):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert not attention._active


def test_packed_attention_outside_of_a_micro_batch_is_refused() -> None:
    model = tiny_model(attention=attention.SEGMENTED)
    with pytest.raises(ModelError, match=r"Packer\.running"):
        model(input_ids=torch.arange(4)[None])


def test_inputs_that_packed_attention_cannot_honour_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="position_bias"):
        attention.segmented_attention(torch.nn.Identity(), q, q, q, None, position_bias=q)
    with pytest.raises(ModelError, match="attention_mask"):
        attention.segmented_attention(torch.nn.Identity(), q, q, q, q)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_sees_the_same_samples(reentrant: bool) -> None:
    model = tiny_model("mistral", dtype=torch.float64)
    packer = choose_packer(model)
    micro = packer.collate(samples(), "cpu")
    plain = gradients(model.train(), micro, packer)
    checkpointing(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    for a, b in zip(plain, gradients(model, micro, packer), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_recomputation_in_another_thread_sees_the_same_samples() -> None:
    model = tiny_model("llama", dtype=torch.float64).train()
    checkpointing(model, False)
    packer = choose_packer(model)
    micro = packer.collate(samples(), "cpu")
    expected = gradients(model, micro, packer)
    model.zero_grad()
    with packer.running(model, micro):
        hidden = final_hidden_states(model, micro.inputs).flatten(0, 1)[micro.predict_from]
        loss = F.cross_entropy(model.lm_head(hidden), micro.targets, reduction="sum")
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_two_models_run_packed_rows_at_once() -> None:
    one, two = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    packer = choose_packer(one)
    micro, other = packer.collate(samples(), "cpu"), packer.collate(samples()[:2], "cpu")
    with packer.running(one, micro), packer.running(two, other):
        final_hidden_states(two, other.inputs)
        found = final_hidden_states(one, micro.inputs)
    with packer.running(one, micro):
        assert torch.equal(found, final_hidden_states(one, micro.inputs))


def test_adapters_take_the_same_path() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(tiny_model("llama", dtype=torch.float64), config)
    packer = choose_packer(model)
    assert packer.path == "packed"
    rows = samples()
    packed = gradients(model, packer.collate(rows, "cpu"), packer)
    padded_packer = choose_packer(model, prefer="padded")
    padded = gradients(model, padded_packer.collate(rows, "cpu"), padded_packer)
    assert max(float((a - b).abs().max()) for a, b in zip(packed, padded, strict=True)) < 1e-12
    assert any(float(a.abs().max()) > 0 for a in packed)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_attention_dropout_is_drawn_in_training(family: str) -> None:
    model = tiny_model(family, attention_dropout=0.5).train()
    packer = choose_packer(model)
    micro = packer.collate(samples(), "cpu")
    with packer.running(model, micro), torch.no_grad():
        one, two = (final_hidden_states(model, micro.inputs) for _ in range(2))
        model.eval()
        three, four = (final_hidden_states(model, micro.inputs) for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(three, four)


# --- one kernel for all samples -------------------------------------------------------------------------------------------


def kernel(q, k, v, starts, starts_k, longest, longest_k, *, scale, window_size, enable_gqa=False):
    """The kernel's contract, written out: ``[T, heads, d]``, bounds of the samples, positions to the left and right."""
    assert starts.dtype == torch.int32
    assert torch.equal(starts, starts_k)
    assert longest == longest_k == int((starts[1:] - starts[:-1]).max())
    outputs = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        qs, ks, vs = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        if enable_gqa:
            ks, vs = (x.repeat_interleave(len(qs) // len(ks), 0) for x in (ks, vs))
        i = torch.arange(end - begin)
        distance = i[:, None] - i[None]
        allowed = (distance >= -window_size[1]) & ((distance <= window_size[0]) | (window_size[0] < 0))
        scores = (qs @ ks.transpose(1, 2) * scale).masked_fill(~allowed, float("-inf"))
        outputs.append((scores.softmax(-1) @ vs).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_sliding"])
@pytest.mark.parametrize("mode", ["grouped", "repeated"])
def test_variable_length_kernel_is_called_with_the_same_meaning(
    family: str, mode: varlen.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, dtype=torch.float64)
    packer = choose_packer(model)
    micro = packer.collate(samples(), "cpu")
    expected = gradients(model, micro, packer)
    calls = []

    def joined(q, k, v, starts, longest, scale, window):
        calls.append(window)
        return varlen._run(q, k, v, starts, longest, scale, window, mode)

    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    monkeypatch.setattr(attention, "varlen", joined)
    found = gradients(model, micro, packer)
    assert len(calls) == 2
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) < 1e-12


def test_variable_length_kernel_is_left_alone_on_a_cpu() -> None:
    q = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    assert varlen.varlen(q, q, q, torch.tensor([0, 4], dtype=torch.int32), 4, 1.0, None) is None
