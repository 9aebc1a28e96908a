"""What a plan counts for the arrays of logits that a step keeps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from agilerl.distributed.plan import Counts, Workload, plan_of

CONFIG = SimpleNamespace(hidden_size=256, intermediate_size=512, num_attention_heads=4, vocab_size=2**15)
TILE = 2**24 * 4  # bytes of a full one


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("threads", "width", "targets", "wanted"),
    [
        (1, 256, 1024, TILE),
        (2, 256, 1024, 2 * TILE),
        (2, 64, 1024, TILE),
        (2, 256, 512, TILE),
        (2, 256, 16, TILE // 32),
    ],
)
def test_each_lane_keeps_an_array_of_logits(threads: int, width: int, targets: int, wanted: int) -> None:
    torch.set_num_threads(threads)
    config = SimpleNamespace(**vars(CONFIG) | {"hidden_size": width})
    counts = Counts(frozen=10**7, trained=10**4, outside=10**6, blocks=2, adapter_rank=8)
    plans = [
        plan_of(
            counts, config, Workload(tokens=2 * targets, targets=targets, longest=targets), dtype="float32",
            gradient_checkpointing=True, fsdp=None, world_size=world, device=device,
        )
        for world, device in ((1, "cpu"), (2, "cpu"), (1, "cuda"))
    ]  # fmt: skip
    alone, among_ranks, on_gpu = (plan.parts for plan in plans)
    assert alone["logits"] == wanted
    assert among_ranks["logits"] == min(TILE, wanted)
    assert "logits" not in on_gpu
