"""The length budget: which rows are dropped, which are cut, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from agilerl.data.records import Example, PreferenceExample, RowFault, Span
from agilerl.errors import DataError

__all__ = ["LengthPolicy", "OnLong", "fit", "fit_preference"]

OnLong = Literal["drop", "cut_response", "cut_prompt", "split"]


@dataclass(frozen=True)
class LengthPolicy:
    """What happens to rows that are longer than the model may see.

    Args:
        max_length: Most tokens of a row, prompt and response together; None: no limit.
        min_response: A row is dropped when its prompt leaves fewer tokens than this for the response.
        on_long: ``drop`` the row; ``cut_response`` at its end; ``cut_prompt`` from its left but keep its head (BOS and
            system turn), then the response if need be; ``split`` plain text into several rows (other rows are cut).
    """

    max_length: int | None = None
    min_response: int | None = None
    on_long: OnLong = "cut_response"

    def __post_init__(self) -> None:
        for name, value in (("max_context_length", self.max_length), ("min_completion_length", self.min_response)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise DataError(f"{name} is {value!r}; it must be a positive whole number or None.")
        if self.on_long not in get_args(OnLong):
            raise DataError(f"on_long is {self.on_long!r}; it must be one of {', '.join(get_args(OnLong))}.")

    @property
    def room(self) -> int:
        """Tokens that a prompt has to leave."""
        return max(1, self.min_response or 0)


def _window(example: Example, start: int, end: int) -> Example:
    """Tokens [start, end) of an example, spans moved along."""
    spans = tuple(
        Span(max(a, start) - start, min(b, end) - start, weight)
        for a, b, weight in example.spans
        if b > start and a < end
    )
    return replace(
        example,
        ids=example.ids[start:end],
        spans=spans,
        prompt_length=min(max(example.prompt_length - start, 0), end - start),
    )


def _without(example: Example, start: int, end: int) -> Example:
    """An example with the untrained tokens [start, end) taken out."""
    gone = end - start
    ids = np.concatenate([example.ids[:start], example.ids[end:]])
    spans = tuple(Span(a - gone, b - gone, weight) for a, b, weight in example.spans)
    image_end = example.image_end - gone if example.image_end > start else example.image_end
    return replace(example, ids=ids, spans=spans, prompt_length=example.prompt_length - gone, image_end=image_end)


def _pieces(example: Example, size: int) -> Iterator[Example]:
    """Consecutive rows of at most ``size`` tokens, each opening with the example's head (BOS) and losing no target."""
    head, length, start = example.head_length, len(example.ids), example.head_length
    yield _window(example, 0, size)
    start = size
    while start < length:
        # Where nothing stands before it, a piece's first token cannot be a target: start one token earlier, untrained.
        context = max(head, 1)
        end = min(start + size - context, length)
        before = example.ids[:head] if head else example.ids[start - 1 : start]
        piece = _window(example, start, end)
        spans = tuple(Span(a + context, b + context, weight) for a, b, weight in piece.spans)
        yield replace(piece, ids=np.concatenate([before, piece.ids]), spans=spans, prompt_length=context)
        start = end


def fit(example: Example, policy: LengthPolicy) -> tuple[list[Example], bool]:
    """Bring one example within the budget: the rows that come of it, and whether anything was cut.

    Raises:
        RowFault: The row has to be dropped.
    """
    limit, was_cut = policy.max_length, False
    rows = [example]
    if limit is not None and len(example.ids) > limit:
        if policy.on_long == "drop":
            raise RowFault("too_long", f"has {len(example.ids)} tokens, more than {limit}")
        if policy.on_long == "split" and example.is_whole and limit > example.head_length + 1:
            rows = list(_pieces(example, limit))
        else:
            rows, was_cut = [_cut(example, limit, policy)], True
    elif limit is not None and example.prompt_length > limit - policy.room:
        # The row fits, but its response is shorter than the least that was asked for.
        raise RowFault(
            "prompt_too_long", f"has a prompt of {example.prompt_length} tokens, which leaves too few of {limit}"
        )
    kept = [row for row in rows if row.num_targets]
    if not kept:
        raise RowFault("no_trained_token", "has no token to train on")
    return kept, was_cut


def _cut(example: Example, limit: int, policy: LengthPolicy) -> Example:
    room = policy.room
    if policy.on_long == "cut_prompt":
        head = min(example.head_length, example.prompt_length)
        excess = min(len(example.ids) - limit, example.prompt_length - head)
        example = _without(example, head, head + excess)
    if example.prompt_length > limit - room:
        raise RowFault(
            "prompt_too_long",
            f"has a prompt of {example.prompt_length} tokens, which leaves fewer than {room} of {limit}",
        )
    if example.image_end > limit:
        raise RowFault(
            "too_long", f"has images up to token {example.image_end}, beyond {limit}, and they cannot be cut"
        )
    return _window(example, 0, min(limit, len(example.ids)))


def fit_preference(pair: PreferenceExample, policy: LengthPolicy) -> tuple[PreferenceExample, bool]:
    """Bring both answers within the budget without emptying either; the shared prompt stays the same on both sides.

    Raises:
        RowFault: The pair has to be dropped.
    """
    limit = policy.max_length
    if limit is None or (policy.on_long != "cut_prompt" and max(len(pair.chosen.ids), len(pair.rejected.ids)) <= limit):
        chosen, rejected = fit(pair.chosen, policy)[0][0], fit(pair.rejected, policy)[0][0]
        return PreferenceExample(chosen, rejected), False
    if policy.on_long == "cut_prompt":
        longest = max(len(pair.chosen.ids), len(pair.rejected.ids))
        head = min(pair.chosen.head_length, pair.chosen.prompt_length)
        excess = min(max(longest - limit, 0), pair.chosen.prompt_length - head)
        if excess:
            pair = PreferenceExample(*(_without(side, head, head + excess) for side in (pair.chosen, pair.rejected)))
    else:
        excess = 0
    policy = replace(policy, on_long="drop" if policy.on_long == "drop" else "cut_response")
    (chosen, cut_chosen), (rejected, cut_rejected) = fit(pair.chosen, policy), fit(pair.rejected, policy)
    return PreferenceExample(chosen[0], rejected[0]), bool(excess or cut_chosen or cut_rejected)
