"""Micro-batches of answer pairs: the prompt is computed once and both answers attend to it.

    [prompt | chosen | rejected], positions 0..P+C-1, then P..P+R-1 again

Each answer's tokens see the prompt and their own answer only, so every hidden state is what it would be in a row of its
own. Where the architecture does not take packed rows, the two rows of a pair lie side by side in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agilerl.models.microbatch import MicroBatch, Sample
from agilerl.models.packing import Packer

__all__ = ["Pair", "PairMicroBatch", "collate_pairs", "pair_length", "shared_length"]


class Pair(NamedTuple):
    """Two answers to one prompt, each as a whole row (prompt and answer)."""

    chosen: Sample
    rejected: Sample


@dataclass
class PairMicroBatch:
    """A micro-batch whose targets belong to answer ``2 i`` (chosen) or ``2 i + 1`` (rejected) of pair ``i``."""

    micro: MicroBatch
    keys: tuple[bytes, ...]
    """One per pair: what identifies its content."""

    @property
    def num_pairs(self) -> int:
        """Pairs in the micro-batch; 0 in one that only keeps ranks in step."""
        return len(self.keys)


def shared_length(pair: Pair) -> int:
    """Leading tokens that both rows have in common and that neither trains; 0 where nothing can be shared.

    At least one token of each row stays outside of the shared part.
    """
    (a, wa, *_), (b, wb, *_) = pair
    limit = min(len(a), len(b)) - 1
    if limit < 1:
        return 0
    differs = (a[:limit] != b[:limit]) | (wa[:limit] != 0) | (wb[:limit] != 0)
    differs[0] = a[0] != b[0]  # the first token is never a target, whatever its weight
    where = torch.nonzero(differs)
    return int(where[0, 0]) if len(where) else limit


def pair_length(pair: Pair, packer: Packer, *, share_prompt: bool) -> int:
    """Tokens that the model computes for a pair."""
    total = len(pair.chosen.ids) + len(pair.rejected.ids)
    return total - (shared_length(pair) if share_prompt and packer.path == "packed" else 0)


def collate_pairs(
    packer: Packer, pairs: Sequence[Pair], keys: Sequence[bytes], device: torch.device, *, share_prompt: bool
) -> PairMicroBatch:
    """Build one micro-batch of pairs on ``device``; none gives a valid one whose weight is zero."""
    if pairs and share_prompt and packer.path == "packed":
        return PairMicroBatch(_shared(packer, pairs, device), tuple(keys))
    samples = [sample for pair in pairs for sample in pair]
    return PairMicroBatch(packer.collate(samples, device), tuple(keys))


def _shared(packer: Packer, pairs: Sequence[Pair], device: torch.device) -> MicroBatch:
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    predict_from: list[Tensor] = []
    targets: list[Tensor] = []
    weights: list[Tensor] = []
    rows: list[Tensor] = []
    lengths: list[int] = []
    branches: list[tuple[int, int] | None] = []
    start = 0
    for number, pair in enumerate(pairs):
        trunk, first, second = shared_length(pair), len(pair.chosen.ids), len(pair.rejected.ids)
        ids += [pair.chosen.ids, pair.rejected.ids[trunk:]]
        positions += [torch.arange(first), torch.arange(trunk, second)]
        for side, sample in enumerate(pair):
            at = torch.arange(len(sample.ids))
            if side == 1:  # the tail of the second row lies behind the first row
                at = torch.where(at >= trunk, at + first - trunk, at)
            chosen = torch.nonzero((sample.weights != 0) & (torch.arange(len(sample.ids)) > 0)).squeeze(1)
            targets.append(sample.ids[chosen])
            predict_from.append(start + at[chosen - 1])
            weights.append(sample.weights[chosen].to(packer.weight_dtype))
            rows.append(torch.full_like(chosen, 2 * number + side))
        lengths.append(first + second - trunk)
        branches.append((trunk, first))
        start += lengths[-1]

    def moved(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(device, non_blocking=True)

    return MicroBatch(
        inputs={"input_ids": moved(ids).long()[None], "position_ids": moved(positions)[None]},
        predict_from=moved(predict_from),
        targets=moved(targets).long(),
        weights=moved(weights),
        rows=moved(rows),
        num_rows=2 * len(pairs),
        num_tokens=start,
        num_cells=start,
        lengths=tuple(lengths),
        branches=tuple(branches),
    )
