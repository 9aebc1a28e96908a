"""Canonical rows: what every format is turned into before anything is tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Chat",
    "Comparison",
    "Example",
    "Message",
    "Pair",
    "PreferenceExample",
    "Record",
    "Reply",
    "Row",
    "RowFault",
    "Span",
    "Text",
    "Tokens",
]

Message = dict[str, Any]
"""One turn of a chat, as chat templates take it: ``role``, ``content`` and whatever else the turn carries."""

Row = dict[str, Any]
"""One record of a source, as its file holds it."""


class Span(NamedTuple):
    """A run of trained tokens."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; all of it is trained."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two plain strings; the response is trained, the prompt is not."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt that is a chat, and a plain response that follows the opening of the assistant's turn."""

    messages: list[Message]
    response: str
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A whole conversation; which turns are trained is a setting (and a message's own ``train`` or ``weight``)."""

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0
    """Turns before this one are prompt, whoever speaks."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that was tokenised beforehand, with the weight of each token as a target."""

    ids: list[int]
    weights: list[float]


Record = Text | Pair | Reply | Chat | Tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt; both sides are of the same kind."""

    chosen: Pair | Reply | Chat
    rejected: Pair | Reply | Chat


class RowFault(Exception):
    """A row that cannot be used; caught where rows are read, counted by ``reason`` and told with its number."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(slots=True)
class Example:
    """A tokenised row: ids, the trained runs, and the two texts a person reads."""

    ids: NDArray[np.int32]
    """[l]"""
    spans: tuple[Span, ...]
    """Disjoint, ascending, in token positions; a weight is the weight of each token as a target."""
    prompt_length: int
    """Leading tokens before the first trained one."""
    prompt: str
    response: str
    is_whole: bool = False
    """Plain text that may be split, rather than cut, when it is too long."""
    head_length: int = 0
    """Leading tokens that a cut from the left keeps (BOS, system turn)."""
    notes: tuple[str, ...] = ()
    """What to count about this row, such as ``control_tokens``."""
    image_end: int = 0
    """Leading tokens up to the end of the last image; they cannot be cut."""
    image_digest: bytes = b""
    """Of the images that belong to the row, so that equal texts with other pictures are not equal rows."""

    @property
    def num_targets(self) -> int:
        """Tokens with a weight other than 0; the first token of a row is never a target."""
        return sum(end - max(start, 1) for start, end, weight in self.spans if weight != 0.0 and end > max(start, 1))


@dataclass(slots=True)
class PreferenceExample:
    """Two answers to one prompt; both sides start with the same ``prompt_length`` tokens."""

    chosen: Example
    rejected: Example
