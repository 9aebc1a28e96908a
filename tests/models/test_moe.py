"""Routed-expert LoRA by groups of tokens equals PEFT's dense deltas."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor

from agilerl.distributed import set_gradient_checkpointing
from agilerl.models import moe
from agilerl.models.share import share_base
from tests.helpers import tiny_model

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3"]


def make_model(family: str, parameters: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> PeftModel:
    model = tiny_model(family, dtype=torch.float64)
    model.set_experts_implementation("eager")
    attention = ["q_a_proj"] if family == "deepseek_v3" else ["q_proj"]
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=attention, target_parameters=[f"experts.{name}" for name in parameters]
    )
    peft = get_peft_model(model, config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2)
    return peft


def gradients(model: PeftModel) -> tuple[float, dict[str, Tensor]]:
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [None, True, False])
def test_loss_and_gradients_equal_the_dense_path(family: str, recompute: bool | None) -> None:
    model = make_model(family)
    names = list(get_peft_model_state_dict(model))
    loss, grads = gradients(model)
    assert sum("experts" in name for name in grads) >= 4
    assert moe.install(model, recompute=recompute) == (1 if family == "deepseek_v3" else 2)
    found_loss, found = gradients(model)
    assert found_loss == pytest.approx(loss, abs=1e-10)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.isfinite(found[name]).all()
        assert (found[name] - grad).abs().max() <= 1e-10 * max(1.0, grad.abs().max().item()), name
    assert list(get_peft_model_state_dict(model)) == names


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",)])
def test_one_adapted_parameter_is_enough(parameters: tuple[str, ...]) -> None:
    model = make_model("mixtral", parameters)
    loss, _ = gradients(model)
    assert moe.install(model) == 2
    assert gradients(model)[0] == pytest.approx(loss, abs=1e-12)


def test_no_expert_sized_tensor_is_made() -> None:
    model = make_model("mixtral")
    experts = [m for n, m in model.named_modules() if n.endswith("experts")]
    assert experts
    size = model.get_base_model().config.num_local_experts * 2 * 48 * 32
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        # Packed weights themselves are saved as slices; a delta would be a new tensor as large as all of them.
        seen.append(tensor.untyped_storage().nbytes() // 8 if not isinstance(tensor, torch.nn.Parameter) else 0)
        return tensor

    def largest() -> int:
        seen.clear()
        ids = torch.randint(3, 128, (1, 4))
        bases = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def fresh(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in bases:
                pack(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(fresh, lambda t: t):
            model(input_ids=ids, labels=ids).loss.backward()
        return max(seen)

    assert largest() >= size
    moe.install(model)
    assert largest() < size


def test_disabled_and_merged_adapters_go_pefts_way() -> None:
    model = make_model("qwen3_moe")
    base = copy.deepcopy(model).unload()
    merged = copy.deepcopy(model).merge_and_unload()
    moe.install(model)
    ids = torch.randint(3, 128, (1, 9))
    with torch.no_grad():
        with model.disable_adapter():
            assert torch.allclose(model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-12)
        assert torch.allclose(model(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-10)
        model.merge_adapter()
        assert torch.allclose(model(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-10)
        model.unmerge_adapter()
        assert torch.allclose(model(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-10)


def test_copies_on_a_shared_base_keep_the_grouped_path_and_train_alone() -> None:
    model = make_model("mixtral")
    moe.install(model)
    twin = share_base(model)
    assert gradients(twin)[0] == gradients(model)[0]
    assert moe.install(twin) == 0  # still ours
    with torch.no_grad():
        next(p for n, p in twin.named_parameters() if "experts" in n and "lora_B" in n).add_(1.0)
    assert gradients(twin)[0] != gradients(model)[0]


def test_recompute_by_default_only_outside_checkpointed_blocks() -> None:
    model = make_model("mixtral")
    moe.install(model)
    wrapper = next(m for m in model.modules() if isinstance(m, moe._GroupedExperts))
    model.train()
    assert wrapper._recomputes()
    set_gradient_checkpointing(model, True)
    assert not wrapper._recomputes()
    moe.set_recompute(model, True)
    assert wrapper._recomputes()
