"""The plain values of one micro-batch, and how rows are shared out among micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

__all__ = ["MicroBatch", "Sample", "deal_to_lanes", "plan_packed", "plan_padded"]


class Sample(NamedTuple):
    """One row without padding.

    Attributes:
        ids: Token ids, Long ``[l]``.
        weights: Weight of each token as a target, Float ``[l]``; that of the first token is ignored, because nothing
            predicts it.
        extra: Further model inputs of this row (images, token types). One-dimensional tensors as long as ``ids`` go
            with the tokens; any others are joined along their first dimension.
    """

    ids: Tensor
    weights: Tensor
    extra: dict[str, Tensor] | None = None


@dataclass
class MicroBatch:
    """What one forward and backward pass needs.

    Attributes:
        inputs: Keyword arguments for the model.
        predict_from: ``[N]`` positions in the flattened ``[B*L]`` hidden states; each predicts one target.
        targets: ``[N]`` token ids to predict.
        weights: ``[N]`` weight of each target, float32 (float64 for a float64 model).
        rows: ``[N]`` the sample, counted within this micro-batch, that each target belongs to.
        num_rows: Samples in this micro-batch.
        num_tokens: Real tokens.
        num_cells: Tokens that the model computes, padding included.
        lengths: Length of each segment along the packed row; empty on the padded path.
        cell_rows: ``[B*L]`` row of each cell, -1 for padding, where the objective asks for it.
        branches: Where segments hold two continuations of one prompt: (length of the prompt, end of the first), by segment.
    """

    inputs: dict[str, Tensor]
    predict_from: Tensor
    targets: Tensor
    weights: Tensor
    rows: Tensor
    num_rows: int
    num_tokens: int
    num_cells: int
    lengths: tuple[int, ...] = field(default=())
    branches: tuple[tuple[int, int] | None, ...] = field(default=())
    cell_rows: Tensor | None = None


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _balanced(lengths: Sequence[int], order: Sequence[int], num_bins: int, max_rows: int | None) -> list[list[int]]:
    """Deal rows, longest first, each to the lightest bin with room (Graham's longest-processing-time rule)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in order:
        room = [b for b in range(num_bins) if max_rows is None or len(bins[b]) < max_rows]
        best = min(room, key=lambda b: loads[b])
        bins[best].append(index)
        loads[best] += lengths[index]
    return bins


def _first_fit(lengths: Sequence[int], order: list[int], max_rows: int | None, budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in order:
        for b, load in enumerate(loads):
            if load + lengths[index] <= budget and (max_rows is None or len(bins[b]) < max_rows):
                bins[b].append(index)
                loads[b] += lengths[index]
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    return bins


def _up_to(multiple: int, count: int, most: int) -> int:
    return min(-(-count // multiple) * multiple, most)


def plan_packed(
    lengths: Sequence[int], max_rows: int | None, token_budget: int | None, *, multiple: int = 1
) -> list[list[int]]:
    """Share rows out into as few micro-batches as the limits allow, with nearly equal token counts.

    Their number is a multiple of `multiple` where there are rows enough.

    Equal counts keep the peak memory of a step low: nothing is gained by one micro-batch of only long rows. A row
    longer than ``token_budget`` gets a micro-batch of its own. Deterministic; the heaviest micro-batch comes first, so
    that a step that does not fit into memory fails at once.
    """
    if not lengths:
        return []
    order = _longest_first(lengths)
    if token_budget is None:
        num_bins = 1 if max_rows is None else -(-len(order) // max_rows)
        bins = _balanced(lengths, order, _up_to(multiple, num_bins, len(order)), max_rows)
    else:
        tight = _first_fit(lengths, order, max_rows, token_budget)
        bins = _balanced(lengths, order, _up_to(multiple, len(tight), len(order)), max_rows)
        limit = max(token_budget, lengths[order[0]])
        if any(sum(lengths[i] for i in rows) > limit for rows in bins):
            bins = tight
    return sorted(bins, key=lambda rows: (-sum(lengths[i] for i in rows), rows))


def deal_to_lanes(loads: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Deal micro-batches, in the order given, each to the lane that has the least to compute; their numbers by lane."""
    return _balanced(loads, range(len(loads)), num_lanes, None)


def plan_padded(lengths: Sequence[int], max_rows: int | None, token_budget: int | None) -> list[list[int]]:
    """Cut the length-sorted rows into micro-batches whose padded size stays within the limits. Deterministic."""
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        current = bins[-1] if bins else []
        cells = lengths[current[0]] * (len(current) + 1) if current else 0
        has_room = max_rows is None or len(current) < max_rows
        if current and has_room and (token_budget is None or cells <= token_budget):
            current.append(index)
        else:
            bins.append([index])
    return bins
