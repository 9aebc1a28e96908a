"""Rendered chats to ids: control tokens that the template wrote are control, those in a row's own text are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agilerl.data.encoder import TextEncoder

__all__ = ["Place", "TokenMap", "encode_rendered"]


class Place(NamedTuple):
    """Where a text of the row's own stands in a rendering, in characters."""

    start: int
    end: int
    is_answer: bool
    """The assistant wrote it, so thinking and tool tags in it are its own."""


@dataclass
class TokenMap:
    """Ids of a text and which token covers which character."""

    ids: list[int]
    encoding: Any = None
    """Backend encoding, where one encoding covers the text."""
    offsets: list[tuple[int, int]] = field(default_factory=list)
    """Characters of each token, where the text was encoded in parts."""
    shift: int = 0
    """Tokens put before the encoding (BOS)."""

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Tokens [first, last) that cover any of the characters [start, end).

        A token that a merge stretches across the boundary is inside: its text can only be predicted as a whole.
        """
        first = self._first(start, end)
        if first is None:
            return (0, 0)
        last = first
        while last + 1 < len(self.ids) - self.shift:
            covered = self._chars(last + 1)
            if covered[0] >= end and covered[1] > covered[0]:
                break
            last += 1
            if self.encoding is not None and covered[1] < end:
                jump = self._jump(last, end)
                last = max(last, jump)
        return first + self.shift, last + 1 + self.shift

    def _jump(self, last: int, end: int) -> int:
        for position in range(end - 1, max(end - 8, -1), -1):
            token = self.encoding.char_to_token(position)
            if token is not None:
                return token
        return last

    def _first(self, start: int, end: int) -> int | None:
        if self.encoding is None:
            return next((i for i, (a, b) in enumerate(self.offsets) if b > start and a < end and b > a), None)
        for position in range(start, end):
            token = self.encoding.char_to_token(position)
            if token is not None:
                return token
        return None

    def _chars(self, token: int) -> tuple[int, int]:
        if self.encoding is None:
            return self.offsets[token]
        return self.encoding.token_to_chars(token) or (0, 0)


def encode_rendered(encoder: TextEncoder, rendered: Sequence[tuple[str, list[Place]]]) -> list[TokenMap]:
    """Token maps of rendered texts; each comes with the places of the row's own texts in it."""
    maps: list[TokenMap | None] = [None] * len(rendered)
    whole = []
    for place, (text, contents) in enumerate(rendered):
        if not encoder.parses_control_tokens and any(
            encoder.has_control_token(text[start:end], is_answer=is_answer) for start, end, is_answer in contents
        ):
            maps[place] = _in_parts(encoder, text, contents)
        else:
            whole.append(place)
    encodings = encoder.encodings([rendered[place][0] for place in whole])
    for place, encoding in zip(whole, encodings, strict=True):
        maps[place] = TokenMap(list(encoding.ids), encoding)
    return [_with_one_bos(encoder, tokens) for tokens in maps if tokens is not None]


def _in_parts(encoder: TextEncoder, text: str, contents: list[Place]) -> TokenMap:
    """Cut at the template's own control tokens, and at tags that the assistant wrote; between them nothing is control."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for start, end, token, is_tag in [*encoder.control_tokens_in(text), (len(text), len(text), None, False)]:
        if any(a < end and b > start and not (is_tag and is_answer) for a, b, is_answer in contents):
            continue
        if start > position:
            encoding = encoder.encodings([text[position:start]], parse=False)[0]
            ids += encoding.ids
            offsets += [(a + position, b + position) for a, b in encoding.offsets]
        if token is not None:
            ids.append(token)
            offsets.append((max(start, position), end))
            position = end
    return TokenMap(ids, offsets=offsets)


def _with_one_bos(encoder: TextEncoder, tokens: TokenMap) -> TokenMap:
    """Exactly one BOS, decided from the ids: added where the tokenizer adds one to any text and the template did not."""
    bos = encoder.bos_id
    if bos is None or not encoder.adds_bos or tokens.ids[:1] == [bos]:
        return tokens
    return TokenMap([bos, *tokens.ids], tokens.encoding, tokens.offsets, shift=1)
