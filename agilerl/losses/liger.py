"""The fused linear cross-entropy kernel of the Liger project (arXiv 2410.10989), where it can run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from agilerl.losses.cross_entropy import linear_cross_entropy
from agilerl.losses.heads import HeadLike
from agilerl.losses.token_sum import TokenSum
from agilerl.optional import has, require

__all__ = ["choose_loss", "liger_cross_entropy", "why_not_liger"]

logger = logging.getLogger(__name__)
_told: set[str] = set()


def why_not_liger(device: torch.device) -> str | None:
    """Why the kernel cannot run on ``device``, in words; None where it can."""
    if device.type != "cuda":
        return f"the Liger kernel needs a CUDA device, and this agent is on {device}"
    if not has("liger_kernel"):
        return "the package liger-kernel is not installed (pip install 'agilerl[liger]')"
    return None


def choose_loss(use_liger: bool, device: torch.device) -> Callable[..., TokenSum]:
    """The loss to compute with. Where Liger is asked for and cannot run, that is told once; the result is the same."""
    reason = why_not_liger(device) if use_liger else None
    if reason is not None and reason not in _told:
        _told.add(reason)
        logger.warning("use_liger_loss: %s; the package's own loss computes, with the same result.", reason)
    return liger_cross_entropy if use_liger and reason is None else linear_cross_entropy


def liger_cross_entropy(
    hidden: Tensor,
    head: HeadLike,
    targets: Tensor,
    weights: Tensor,
    *,
    chunk_rows: int | None = None,
    need_grad: bool = True,
) -> TokenSum:
    """`linear_cross_entropy` by the Liger kernel, which sizes its own chunks.

    The kernel knows no weight per token (it would scale every gradient by the first one's): rows with unequal weights,
    heads that are more than one matrix, float64 and empty micro-batches go through the package's own loss.
    """
    linear = head.linear()
    is_plain = linear is not None and linear[0].dtype != torch.float64 and hidden.shape[0] > 0
    if not is_plain or bool((weights != weights[0]).any()):
        return linear_cross_entropy(hidden, head, targets, weights, chunk_rows=chunk_rows, need_grad=need_grad)
    assert linear is not None
    functional = require("liger_kernel.transformers.functional", "liger", "use_liger_loss")
    weight, bias = linear
    scaled = hidden if head.scale == 1.0 else hidden * head.scale
    if bias is not None and head.scale != 1.0:
        bias = bias * head.scale
    total = functional.liger_fused_linear_cross_entropy(
        scaled.to(weight.dtype),
        weight,
        targets,
        bias=bias,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
    )
    weights = weights.detach().float()
    return TokenSum(total.float() * weights[0], weights.sum())
