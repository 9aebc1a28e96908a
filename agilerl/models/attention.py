"""Attention for a packed row: every sample attends to itself and to nothing else.

A packed row holds several samples one after the other, ``[1, T]``. The function here is registered with transformers'
attention interface under the name `SEGMENTED`; a model computes with it while its configuration names it, which
`Packer.running` sees to. The boundaries are looked up by the identity of the configuration object, which all attention
modules of one model share and no two models do. They are kept per lane (`agilerl.lanes`); outside of lanes they are kept for the
whole process and not per thread, because gradient checkpointing recomputes blocks in threads that belong to autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from agilerl import lanes
from agilerl.errors import ModelError
from agilerl.models.cpu_attention import attention
from agilerl.models.varlen import varlen

__all__ = ["SEGMENTED", "Segments", "attend", "segmented_attention"]

SEGMENTED = "agilerl_segments"

# Named arguments that describe the call and do not change what has to be computed per sample.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "cache_position",
        "indices",
        "head_mask",
        "past_key_values",
        "position_embeddings",
    }
)


@dataclass
class Segments:
    """Boundaries of the samples in the packed row that a model is computing, and what every layer reuses."""

    lengths: tuple[int, ...]
    branches: tuple[tuple[int, int] | None, ...] = ()
    """Per sample, where two continuations share a prompt: (length of the prompt, end of the first continuation)."""
    calls: int = 0
    tensors: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def mask(self, rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
        """Causal, banded to the last `window` positions, ``[rows, columns]``; True where attention is allowed.

        The rows are the last ones of a square: fewer rows than columns are tokens that follow on from earlier ones.
        """
        window = None if not window or columns <= window else window
        key = ("mask", rows, columns, window, device)
        if key not in self.tensors:
            offset = columns - rows
            mask = torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(offset)
            self.tensors[key] = mask if window is None else mask.triu_(1 - window + offset)
        return self.tensors[key]

    def pieces(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries with the keys and values that they may see, in the order of the packed row.

        The second continuation of a shared prompt sees the prompt and itself, and not the first continuation.
        """
        # Split, not sliced: the gradients of slices are arrays of the whole row, each filled with zeros and added up.
        cuts = self._cuts
        queries, keys, values = (iter(t.split(sizes, 2)) for t, sizes in zip((q, k, v), cuts, strict=True))
        for branch in self.branches or (None,) * len(self.lengths):
            if branch is None:
                yield next(queries), next(keys), next(values)
                continue
            trunk_k, first_k, second_k = islice(keys, 3)
            trunk_v, first_v, second_v = islice(values, 3)
            yield next(queries), torch.cat([trunk_k, first_k], 2), torch.cat([trunk_v, first_v], 2)
            yield next(queries), torch.cat([trunk_k, second_k], 2), torch.cat([trunk_v, second_v], 2)

    @cached_property
    def _cuts(self) -> tuple[list[int], list[int], list[int]]:
        """Sizes of the pieces of queries, keys and values."""
        answers: list[int] = []
        seen: list[int] = []
        for length, branch in zip(self.lengths, self.branches or (None,) * len(self.lengths), strict=True):
            trunk, first = branch or (0, 0)
            answers += [length] if branch is None else [first, length - first]
            seen += [length] if branch is None else [trunk, first - trunk, length - first]
        return answers, seen, seen

    def starts(self, device: torch.device) -> Tensor:
        """First position of each sample and the total, int32 ``[samples + 1]``."""
        key = ("starts", device)
        if key not in self.tensors:
            bounds = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self.tensors[key] = bounds.to(device, non_blocking=True)
        return self.tensors[key]


_active: dict[int, Segments] = {}
_own: dict[int, tuple[int, Any]] = {}  # identity of a configuration -> (packed rows under way, the attention it names)
_lock = threading.Lock()


@contextmanager
def attend(
    configs: Sequence[Any], lengths: Iterable[int], branches: Iterable[tuple[int, int] | None] = ()
) -> Iterator[Segments]:
    """Make models with these configuration objects compute on a packed row of the given sample lengths.

    Args:
        configs: The configuration objects of one model.
        lengths: Tokens of each sample, in order.
        branches: See `Segments`; empty where no sample has two continuations.
    """
    segments = Segments(tuple(lengths), tuple(branches))
    active = _segments_by_config()
    for config in configs:
        active[id(config)] = segments
        _switch(config, 1)
    try:
        yield segments
    finally:
        for config in configs:
            _switch(config, -1)
            active.pop(id(config), None)


def _segments_by_config() -> dict[int, Segments]:
    lane = lanes.current()
    return _active if lane is None else lane.segments


def _switch(config: Any, step: int) -> None:
    """The first packed row switches the attention over, the last one back: lanes share the configuration."""
    with _lock:
        count, own = _own.get(id(config), (0, config._attn_implementation_internal))
        _own[id(config)] = (count + step, own)
        # The internal field: the public setter also rewrites nested configurations, which may differ on purpose.
        config._attn_implementation_internal = SEGMENTED
        if count + step == 0:
            config._attn_implementation_internal = own
            del _own[id(config)]


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with the terms that SDPA lacks: capped scores and attention sinks."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    # As the families compute it: with a softcap the softmax is float32 even in a float64 model (Gemma-2), with sinks it is not.
    exact = scores.dtype if scores.dtype == torch.float64 and sinks is not None else torch.float32
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1).to(scores.dtype)
        weights = torch.cat([scores, column], -1).softmax(-1, dtype=exact)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=exact)
    return F.dropout(weights.to(v.dtype), dropout) @ v


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a packed row.

    Args:
        module: The attention module that calls; its configuration tells which packed row is being computed.
        query: ``[1, heads, T, d]``.
        key: ``[1, key heads, T, d]``.
        value: ``[1, key heads, T, d]``.
        attention_mask: Must be None: the boundaries replace it.
        scaling: Factor of the scores; None means ``d ** -0.5``.
        dropout: Probability of attention dropout.
        sliding_window: Positions that a token sees, itself included.
        softcap: Bound of the scores, ``s * tanh(score / s)``.
        s_aux: Attention sinks, one score per head.
        **kwargs: What else a model hands over. Anything that could change the result is refused.

    Returns:
        ``[1, T, heads, d]`` and None for the attention weights.

    Raises:
        ModelError: The call cannot be served exactly.
    """
    unknown = [name for name, v in kwargs.items() if isinstance(v, Tensor) and name not in _HARMLESS]
    if attention_mask is not None or unknown:
        found = ", ".join(unknown) or "attention_mask"
        raise ModelError(f"Packed attention was given {found}, which it cannot honour; use the padded path instead.")
    segments = _segments_by_config().get(id(getattr(module, "config", None)))
    if segments is None or query.shape[2] != sum(segments.lengths) or key.shape[2] != query.shape[2]:
        raise ModelError("Packed attention was called outside of a packed micro-batch; use Packer.running.")
    segments.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = not softcap and s_aux is None
    if plain and not dropout and not segments.branches:
        joined = varlen(
            query, key, value, segments.starts(query.device), max(segments.lengths), scale, sliding_window or None
        )
        if joined is not None:
            return joined, None
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    for q, k, v in segments.pieces(query, key, value):
        rows, columns = q.shape[2], k.shape[2]
        if plain:
            masked = rows != columns or (bool(sliding_window) and columns > (sliding_window or 0))
            mask = segments.mask(rows, columns, sliding_window, q.device) if masked else None
            out = None if dropout else attention(q, k, v, mask, scale)
            if out is None:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
                )
        else:
            mask = segments.mask(rows, columns, sliding_window, q.device)
            out = _explicit(q, k, v, scale, mask, dropout, softcap, s_aux)
        outputs.append(out)
    # The copy that the joining makes leaves the heads next to each other, as the output projection wants them.
    return torch.cat([out.transpose(1, 2) for out in outputs], 1), None


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, lambda *args, **kwargs: None)
