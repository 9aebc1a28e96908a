"""Losses on pairs of answers, as pure functions of their log-probabilities."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl.errors import ConfigError

__all__ = ["PREFERENCE_LOSSES", "PreferenceLoss", "needs_reference", "preference_loss"]

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "sigmoid_norm", "simpo"]
PREFERENCE_LOSSES: tuple[str, ...] = get_args(PreferenceLoss)


def needs_reference(kind: str) -> bool:
    """Whether the loss compares the policy with a reference."""
    return kind != "simpo"


def preference_loss(
    kind: str,
    policy: Tensor,
    reference: Tensor,
    lengths: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> Tensor:
    """Loss of each pair, [P].

    With ``d`` the policy's log-ratio of the chosen answer to the reference, minus that of the rejected one:

    * ``sigmoid``: ``-log sigmoid(beta * d)`` (DPO, arXiv 2305.18290). With ``label_smoothing`` e it is
      ``-(1 - e) log sigmoid(beta * d) - e log sigmoid(-beta * d)``: a share e of the labels is taken to be wrong
      (conservative DPO, Mitchell 2023).
    * ``ipo``: ``(d - 1 / (2 beta))^2`` (arXiv 2310.12036).
    * ``hinge``: ``max(0, 1 - beta * d)`` (SLiC, arXiv 2305.10425).
    * ``sigmoid_norm``: as ``sigmoid``, each log-ratio divided by its answer's length (arXiv 2411.15124).
    * ``simpo``: ``-log sigmoid(beta * (mean log p of chosen - of rejected) - margin)``, without a reference
      (arXiv 2405.14734).

    Args:
        kind: One of `PREFERENCE_LOSSES`.
        policy: Summed log-probabilities of (chosen, rejected) under the policy, [P, 2].
        reference: The same under the reference, [P, 2]; not read by ``simpo``.
        lengths: Sum of token weights of (chosen, rejected), [P, 2].
        beta: Strength of the preference.
        label_smoothing: Share of labels assumed to be wrong, for the sigmoid forms.
        margin: Target margin of ``simpo``.
    """
    if kind not in PREFERENCE_LOSSES:
        raise ConfigError(f"There is no preference loss {kind!r}; choose from {', '.join(PREFERENCE_LOSSES)}.")
    scores = policy if kind == "simpo" else policy - reference
    if kind in ("sigmoid_norm", "simpo"):
        scores = scores / lengths
    difference = scores[:, 0] - scores[:, 1]  # [P]
    if kind == "ipo":
        return (difference - 1.0 / (2.0 * beta)).square()
    if kind == "hinge":
        return torch.relu(1.0 - beta * difference)
    logits = beta * difference - (margin if kind == "simpo" else 0.0)
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
