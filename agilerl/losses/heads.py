"""What a loss needs to know of a language-model head."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["HeadLike", "default_chunk_rows"]

_CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32."""


class HeadLike(Protocol):
    """The map from final hidden states to logits, as ``agilerl.models.head.Head`` offers it."""

    @property
    def scale(self) -> float:
        """Factor between the head's output and the logits."""
        ...

    @property
    def softcap(self) -> float | None:
        """Bound ``c`` of ``c * tanh(x / c)``, applied after the scale; None without one."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits, V."""
        ...

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [V, H] and bias [V] where the head is a plain linear layer, else None."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], for any head."""
        ...


def default_chunk_rows(vocab_size: int) -> int:
    """Rows of one tile of logits: a pure function of the vocabulary, so that results do not depend on free memory."""
    return max(16, min(4096, _CHUNK_ELEMENTS // max(1, vocab_size)))
