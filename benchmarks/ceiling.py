"""The matrix products of a training step and nothing else: what no implementation can go below.

Each product of the forward and backward pass is timed by itself at the size that a micro-batch has, the best of several
tries, and summed over layers. Attention scores, adapters and everything that is not a product are left out, so the
ceiling is a little higher than a real step could reach. In half precision the faster of two ways counts: the
processor's own products, or float32 ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ceiling_tokens_per_s"]


def _seconds(rows: int, inner: int, columns: int, dtype: torch.dtype, tries: int, clock: Callable[[], float]) -> float:
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    best = float("inf")
    for _ in range(tries):
        began = clock()
        torch.mm(left, right.t())
        best = min(best, clock() - began)
    return best


def ceiling_tokens_per_s(
    config: Any, *, dtype: str, checkpointing: bool, rows: int, trained_share: float, threads: int, tries: int = 5
) -> float:
    """Tokens per second that the matrix products alone would allow.

    Args:
        config: Configuration of a Llama-like model.
        dtype: float32 or bfloat16.
        checkpointing: Whether the blocks' forward products are done twice.
        rows: Tokens of a micro-batch.
        trained_share: Share of tokens that pass the head.
        threads: Of the processor.
        tries: The best of so many.
    """
    torch.set_num_threads(threads)
    # One thread: its own time, so that other processes on the machine do not count.
    clock = time.thread_time if threads == 1 else time.perf_counter
    kinds = [torch.float32] if dtype == "float32" else [torch.bfloat16, torch.float32]
    size, wide = config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or size // config.num_attention_heads
    keys, queries = config.num_key_value_heads * head_size, config.num_attention_heads * head_size
    shapes = [(size, queries), (size, keys), (size, keys), (queries, size), (size, wide), (size, wide), (wide, size)]
    forward = backward = 0.0
    for inner, columns in shapes:
        forward += min(_seconds(rows, inner, columns, kind, tries, clock) for kind in kinds)
        backward += min(_seconds(rows, columns, inner, kind, tries, clock) for kind in kinds)
    # The first layer's input needs no gradient: three products fewer, a detail that is left out.
    blocks = config.num_hidden_layers * (forward * (2 if checkpointing else 1) + backward)
    tile = 256
    head = min(
        _seconds(tile, size, config.vocab_size, kind, tries, clock)
        + _seconds(tile, config.vocab_size, size, kind, tries, clock)
        for kind in kinds
    )
    return rows / (blocks + head * rows * trained_share / tile)
