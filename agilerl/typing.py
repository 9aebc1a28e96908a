"""Types shared by all rooms: the batches that people see, and a few aliases."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from torch import Tensor

__all__ = ["Batch", "Objective", "PreferencePrompts", "SFTPrompts"]

Objective = Literal["sft", "preference"]


class SFTPrompts(TypedDict):
    """A padded batch of (prompt, response) rows; ``learn`` needs ids, mask and prompt lengths only.

    A token is a target iff its weight is non-zero, its mask is 1 and it is not the first real token of its row. Without
    ``response_weights`` the weight is 0 for the ``prompt_lengths`` leading real tokens and 1 after them. Padding may be on
    either side.
    """

    prompt: NotRequired[list[str]]
    response: NotRequired[list[str]]
    prompt_lengths: NotRequired[list[int]]
    """Leading real (unpadded) prompt tokens of each row."""
    input_ids: Tensor
    """Long [B, L]."""
    attention_mask: Tensor
    """Long [B, L]."""
    response_weights: NotRequired[Tensor]
    """Float [B, L]: weight of each token as a target; where present it replaces ``prompt_lengths``."""
    inputs: NotRequired[list[dict[str, Tensor] | None]]
    """Further model inputs of each row, such as pixels; None for a row without. One-dimensional tensors as long as the
    row's real tokens (token types) go with the tokens, all others are joined along their first dimension."""


class PreferencePrompts(TypedDict):
    """A padded batch of (prompt, chosen, rejected) rows; each side holds prompt + answer."""

    prompt: NotRequired[list[str]]
    chosen: NotRequired[list[str]]
    rejected: NotRequired[list[str]]
    prompt_lengths: list[int]
    """Leading real prompt tokens, the same for both sides."""
    chosen_input_ids: Tensor
    chosen_attention_mask: Tensor
    rejected_input_ids: Tensor
    rejected_attention_mask: Tensor
    chosen_weights: NotRequired[Tensor]
    rejected_weights: NotRequired[Tensor]


Batch = SFTPrompts | PreferencePrompts
