"""Canonical rows to examples: ids and the runs of them that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agilerl.data.chat import ChatRenderer
from agilerl.data.encoder import TextEncoder
from agilerl.data.fields import damage_in
from agilerl.data.records import (
    Chat,
    Comparison,
    Example,
    Pair,
    PreferenceExample,
    Record,
    Reply,
    RowFault,
    Span,
    Text,
    Tokens,
)
from agilerl.errors import DataError

__all__ = ["RowTokenizer"]

Outcome = Example | RowFault


class RowTokenizer:
    """Tokenises batches of canonical rows of any mix of kinds.

    Plain prompts and responses are encoded separately, so no merge crosses the boundary; BOS comes from the tokenizer, once;
    one EOS ends a response. Chats go through the template.

    Args:
        encoder: The tokenizer.
        chat: Renders chats; None where a split has none.
    """

    def __init__(self, encoder: TextEncoder, chat: ChatRenderer) -> None:
        self.encoder = encoder
        self.chat = chat

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        """An example, or what is wrong with it, for each record."""
        outcomes: list[Outcome | None] = [None] * len(records)
        handlers: tuple[tuple[type, Callable[[Any], list[Outcome]]], ...] = (
            (Pair, self._pairs),
            (Text, self._texts),
            (Reply, self.chat.replies),
            (Chat, self.chat.chats),
            (Tokens, self._tokens),
        )
        for kind, handler in handlers:
            places = [place for place, record in enumerate(records) if isinstance(record, kind)]
            if places:
                chosen: Any = [records[place] for place in places]
                for place, outcome in zip(places, handler(chosen), strict=True):
                    outcomes[place] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def comparisons(self, pairs: Sequence[Comparison]) -> list[PreferenceExample | RowFault]:
        """Both answers of each comparison; they start with the same prompt tokens."""
        sides = self([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
        outcomes: list[PreferenceExample | RowFault] = []
        for chosen, rejected in zip(sides[: len(pairs)], sides[len(pairs) :], strict=True):
            if isinstance(chosen, RowFault):
                outcomes.append(RowFault(chosen.reason, f"{chosen.message} (chosen)"))
            elif isinstance(rejected, RowFault):
                outcomes.append(RowFault(rejected.reason, f"{rejected.message} (rejected)"))
            else:
                outcomes.append(_with_shared_prompt(chosen, rejected))
        return outcomes

    def _pairs(self, pairs: list[Pair]) -> list[Outcome]:
        eos = self._eos()
        prompts = self.encoder.encode([self._without_bos(pair.prompt) for pair in pairs], special=True)
        responses = self.encoder.encode([self._without_eos(pair.response) for pair in pairs])
        head = len(self.encoder.plain_prefix)
        rows: list[Outcome] = []
        for pair, prompt, response in zip(pairs, prompts, responses, strict=True):
            ids = np.array([*prompt, *response, eos], dtype=np.int32)
            rows.append(
                Example(
                    ids,
                    (Span(len(prompt), len(ids), 1.0),),
                    len(prompt),
                    pair.prompt,
                    pair.response,
                    head_length=head,
                    notes=self._notes(pair.prompt, pair.response),
                )
            )
        return rows

    def _texts(self, texts: list[Text]) -> list[Outcome]:
        eos = self._eos()
        stripped = [self._without_eos(self._without_bos(text.text)) for text in texts]
        head = len(self.encoder.plain_prefix)
        rows: list[Outcome] = []
        for text, ids in zip(texts, self.encoder.encode(stripped, special=True), strict=True):
            array = np.array([*ids, eos], dtype=np.int32)
            rows.append(
                Example(
                    array,
                    (Span(head, len(array), 1.0),),
                    head,
                    "",
                    text.text,
                    is_whole=True,
                    head_length=head,
                    notes=self._notes("", self._without_bos(text.text)),
                )
            )
        return rows

    def _tokens(self, rows: list[Tokens]) -> list[Outcome]:
        size = len(self.encoder.tokenizer) if hasattr(self.encoder.tokenizer, "__len__") else None
        outcomes: list[Outcome] = []
        for row in rows:
            if size is not None and max(row.ids) >= size:
                outcomes.append(
                    RowFault("not_tokens", f"has token id {max(row.ids)}, but the tokenizer has {size} tokens")
                )
                continue
            spans = tuple(_runs(row.weights))
            first = spans[0].start if spans else len(row.ids)
            texts = [self.encoder.tokenizer.decode(part) for part in (row.ids[:first], row.ids[first:])]
            outcomes.append(Example(np.array(row.ids, dtype=np.int32), spans, first, texts[0], texts[1]))
        return outcomes

    def _eos(self) -> int:
        if self.encoder.eos_id is None:
            raise DataError(
                "The tokenizer has no EOS token, which has to end every response; set tokenizer.eos_token before making the data."
            )
        return self.encoder.eos_id

    def _without_bos(self, text: str) -> str:
        """Drop a BOS that the text spells itself, where the tokenizer puts one anyway."""
        bos = self.encoder.bos_text
        return text[len(bos) :] if bos and self.encoder.adds_bos and text.startswith(bos) else text

    def _without_eos(self, text: str) -> str:
        """Drop an EOS that the text spells at its end, so that exactly one id ends the row."""
        eos = self.encoder.eos_text
        if not eos or eos not in text:
            return text
        while text.rstrip().endswith(eos):
            text = text.rstrip()[: -len(eos)]
        return text

    def _notes(self, opening: str, ending: str) -> tuple[str, ...]:
        """Whether what is left of the texts, BOS and EOS at the outer ends aside, spells a control token."""
        texts = (self._without_bos(opening), self._without_eos(ending))
        forged = ("control_token",) if any(map(self.encoder.has_control_token, texts)) else ()
        return (*forged, *damage_in(texts))


def _runs(weights: Sequence[float]) -> list[Span]:
    """Runs of equal non-zero weights."""
    runs: list[Span] = []
    for place, weight in enumerate(weights):
        if weight == 0:
            continue
        if runs and runs[-1].end == place and runs[-1].weight == weight:
            runs[-1] = runs[-1]._replace(end=place + 1)
        else:
            runs.append(Span(place, place + 1, weight))
    return runs


def _with_shared_prompt(chosen: Example, rejected: Example) -> PreferenceExample:
    """Trim what follows the last trained token, and end the prompt where the two sides part."""
    chosen, rejected = _trimmed(chosen), _trimmed(rejected)
    limit = min(chosen.prompt_length, rejected.prompt_length)
    differs = np.flatnonzero(chosen.ids[:limit] != rejected.ids[:limit])
    shared = int(differs[0]) if len(differs) else limit
    if len(chosen.ids) == len(rejected.ids) and bool((chosen.ids == rejected.ids).all()):
        chosen = replace(chosen, notes=(*chosen.notes, "identical_answers"))
    head = min(chosen.head_length, shared)
    return PreferenceExample(
        replace(chosen, prompt_length=shared, head_length=head),
        replace(rejected, prompt_length=shared, head_length=head),
    )


def _trimmed(example: Example) -> Example:
    end = example.spans[-1].end if example.spans else len(example.ids)
    return replace(example, ids=example.ids[:end])
