"""Pure functions: tensors in, ``TokenSum`` out. Knows no model and no agent."""

from agilerl.losses.cross_entropy import linear_cross_entropy, token_logprobs
from agilerl.losses.heads import HeadLike, default_chunk_rows
from agilerl.losses.liger import choose_loss
from agilerl.losses.tile import keeping_tile
from agilerl.losses.token_sum import TokenSum

__all__ = [
    "HeadLike",
    "TokenSum",
    "choose_loss",
    "default_chunk_rows",
    "keeping_tile",
    "linear_cross_entropy",
    "token_logprobs",
]
