"""The matrix products of a training step and nothing else: what no implementation can go below.

The products of a micro-batch's forward and backward pass run one after the other, every layer with weights of its own, as
they do in a model; the best of several passes counts. Attention scores, adapters and everything that is not a product are
left out, so the ceiling is a little higher than a real step could reach. In half precision the faster of two ways counts:
the processor's own products, or float32 ones; the own ones are left out where a fraction of a pass already takes longer.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["ceiling_tokens_per_s"]

_HEAD_TILE = 256


def _shapes(config: Any) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of a block."""
    size, wide = config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or size // config.num_attention_heads
    keys, queries = config.num_key_value_heads * head_size, config.num_attention_heads * head_size
    return [(size, queries), (size, keys), (size, keys), (queries, size), (size, wide), (size, wide), (wide, size)]


def _pass(
    inputs: dict[int, Tensor], blocks: list[list[Tensor]], head: Tensor, num_targets: int, recomputes: bool
) -> None:
    for layers in blocks:
        for weight in layers:  # [out, in]
            torch.mm(inputs[weight.shape[1]], weight.t())
    for tile in inputs[head.shape[1]][:num_targets].split(_HEAD_TILE):
        torch.mm(torch.mm(tile, head.t()), head)
    # The first layer's input needs no gradient: three products fewer, a detail that is left out.
    for layers in reversed(blocks):
        if recomputes:
            for weight in layers:
                torch.mm(inputs[weight.shape[1]], weight.t())
        for weight in layers:
            torch.mm(inputs[weight.shape[0]], weight)


def ceiling_tokens_per_s(
    config: Any, *, dtype: str, checkpointing: bool, rows: int, trained_share: float, threads: int, tries: int = 3
) -> float:
    """Tokens per second that the matrix products alone would allow.

    Args:
        config: Configuration of a Llama-like model.
        dtype: float32 or bfloat16.
        checkpointing: Whether the blocks' forward products are done twice.
        rows: Tokens of a micro-batch.
        trained_share: Share of tokens that pass the head.
        threads: Of the processor.
        tries: The best of so many passes.
    """
    torch.set_num_threads(threads)
    # One thread: its own time, so that other processes on the machine do not count.
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = float("inf")
    for kind in (torch.float32,) if dtype == "float32" else (torch.float32, torch.bfloat16):
        shapes = _shapes(config)
        blocks = [[torch.randn(n, k).to(kind) for k, n in shapes] for _ in range(config.num_hidden_layers)]
        inputs = {size: torch.randn(rows, size).to(kind) for shape in shapes for size in shape}
        head = torch.randn(config.vocab_size, config.hidden_size).to(kind)
        targets = round(rows * trained_share)
        began = clock()
        _pass(inputs, blocks[:1], head, targets // len(blocks), checkpointing)
        if clock() - began > best:
            continue
        for _ in range(tries):
            began = clock()
            _pass(inputs, blocks, head, targets, checkpointing)
            best = min(best, clock() - began)
    return rows / best
