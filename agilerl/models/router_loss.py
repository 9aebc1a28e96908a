"""The balance of a mixture of experts: how evenly each row's tokens are shared out among the experts of each layer.

The sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) looks at one row at a time. Balancing over a
batch, as other losses do, would make the result depend on the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.errors import UnsupportedError
from agilerl.models.microbatch import MicroBatch

__all__ = ["balance_loss", "find_routers", "rows_of_cells", "watch_routers"]


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts: those whose outputs transformers records as router logits.

    Raises:
        UnsupportedError: The model has none.
    """
    kinds: set[type] = set()
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for each in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kind = getattr(each, "target_class", each)
            if isinstance(kind, type):
                kinds.add(kind)
    routers = [module for module in model.modules() if isinstance(module, tuple(kinds))]
    if not routers:
        raise UnsupportedError(
            f"router_aux_loss_coef needs a mixture of experts whose routers transformers can record, and "
            f"{type(model).__name__} has none; set it to 0."
        )
    return routers


@contextmanager
def watch_routers(routers: list[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Probabilities [cells, experts] and choices [cells, k] of each router that ran inside the block, once it has ended."""
    raw: list[tuple[nn.Module, Any]] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def see(router: nn.Module, _args: Any, output: Any) -> None:
        raw.append(
            (router, output)
        )  # nothing is computed here: a checkpointed block would not find it when it recomputes

    handles = [router.register_forward_hook(see) for router in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    seen += [_probabilities(router, output) for router, output in raw]


def _probabilities(router: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()):
        raise UnsupportedError(
            f"{type(router).__name__} does not return logits, weights and choices, so router_aux_loss_coef cannot be used "
            "with this model; set it to 0."
        )
    logits, _, choices = output
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if hasattr(router, "e_score_correction_bias"):  # such routers score experts one by one
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    else:
        probabilities = logits.softmax(-1)
    return probabilities.flatten(0, -2), choices.flatten(0, -2)


def rows_of_cells(micro: MicroBatch, lengths: list[int]) -> Tensor:
    """Row of each cell of a micro-batch, Long [cells]; -1 for padding.

    Args:
        micro: The micro-batch.
        lengths: Real tokens of its rows.
    """
    if not lengths:
        return torch.full((micro.num_cells,), -1)
    if micro.lengths:
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    width = micro.num_cells // len(lengths)
    is_real = torch.arange(width) < torch.tensor(lengths)[:, None]  # [rows, width]
    return torch.where(is_real, torch.arange(len(lengths))[:, None], -1).flatten()


def balance_loss(seen: list[tuple[Tensor, Tensor]], rows: Tensor, num_rows: int) -> Tensor:
    """Sum over rows of (tokens x balance loss), averaged over layers; 1 per token where experts are used evenly.

    A row of T tokens has the loss ``experts / (k T) * sum_e (tokens sent to e) * (mean probability of e)``.

    Args:
        seen: Probabilities and choices of each layer, as `watch_routers` gives them.
        rows: Row of each cell, -1 for padding, [cells].
        num_rows: Number of rows.
    """
    real = rows >= 0
    of_token = rows[real]
    counts = torch.bincount(of_token, minlength=num_rows).clamp_min(1)  # [rows]
    layers = []
    for probabilities, choices in seen:
        num_experts, k = probabilities.shape[-1], choices.shape[-1]
        shares = probabilities.new_zeros(num_rows, num_experts).index_add(0, of_token, probabilities[real])
        sent = torch.zeros_like(probabilities).scatter_add(
            1, choices, torch.ones_like(choices, dtype=probabilities.dtype)
        )
        sent = sent.new_zeros(num_rows, num_experts).index_add(0, of_token, sent[real]).detach()
        layers.append(((sent * shares).sum(1) * num_experts / (k * counts)).sum())
    return torch.stack(layers).mean()
