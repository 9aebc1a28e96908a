"""What recomputation leaves out: attention whose result was kept, and what comes after the last thing to be kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl.distributed import set_gradient_checkpointing
from agilerl.models.accelerate import accelerate
from agilerl.models.head import final_hidden_states
from agilerl.models.segments import Sample, choose_packer
from tests.helpers import tiny_model

LENGTHS = (9, 4)
BLOCKS = 2


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def adapted(family: str, targets: list[str], dtype: torch.dtype) -> Any:
    model = get_peft_model(tiny_model(family, dtype=dtype), LoraConfig(r=2, target_modules=targets, lora_alpha=3))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    accelerate(model)
    return model.train()


def step(model: Any) -> tuple[dict[str, Tensor], Counter[str], Counter[str]]:
    """Gradients, and the operations of the forward and of the backward pass."""
    packer = choose_packer(model)
    rows = [Sample(torch.arange(length) + 5, torch.ones(length)) for length in LENGTHS]
    micro = packer.collate(rows, "cpu")
    with packer.running(model, micro):
        with Counting() as forward:
            hidden = final_hidden_states(model, micro.inputs)
        with Counting() as backward:
            hidden.float().square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found, forward.counts, backward.counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral"])  # the second one's window is shorter than a row: with a mask
def test_attention_and_the_last_product_are_not_repeated(family: str, dtype: torch.dtype) -> None:
    model = adapted(family, ["q_proj", "v_proj"], dtype)
    assert choose_packer(model).path == "packed"
    expected, _, plain = step(model)
    assert set_gradient_checkpointing(model, True) == BLOCKS
    found, first, again = step(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert first[attention] == BLOCKS * len(LENGTHS)
    assert again[attention] == 0
    assert again[f"{attention}_backward"] == BLOCKS * len(LENGTHS)
    assert again["silu"] == plain["silu"] == BLOCKS  # in the backward pass of the product, and nowhere else
    # Per block: queries, keys, values, attention's output, gate and up, and the two products of each adapter; not the last one.
    assert again["mm"] - plain["mm"] == BLOCKS * (6 + 2)


def test_an_adapted_last_product_keeps_its_input_and_so_is_recomputed() -> None:
    model = adapted("llama", ["down_proj"], torch.float64)
    expected, _, plain = step(model)
    set_gradient_checkpointing(model, True)
    found, _, again = step(model)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert again["silu"] == plain["silu"] + BLOCKS


def test_a_second_backward_pass_computes_what_is_no_longer_kept() -> None:
    model = adapted("llama", ["q_proj"], torch.float64)
    packer = choose_packer(model)
    micro = packer.collate([Sample(torch.arange(9) + 5, torch.ones(9))], "cpu")
    set_gradient_checkpointing(model, True)
    with packer.running(model, micro):
        loss = final_hidden_states(model, micro.inputs).square().sum()
        parameters = [p for p in model.parameters() if p.requires_grad]
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        twice = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
