"""Rendered chats to ids: control tokens that the template wrote are control, those in a row's own text are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agilerl.data.encoder import TextEncoder

__all__ = ["TokenMap", "encode_rendered"]


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


def encode_rendered(encoder: TextEncoder, rendered: Sequence[tuple[str, list[tuple[int, int]]]]) -> list[TokenMap]:
    """Token maps of rendered texts; each comes with the places of the row's own texts in it."""
    maps: list[TokenMap | None] = [None] * len(rendered)
    whole = []
    for place, (text, contents) in enumerate(rendered):
        if not encoder.parses_control_tokens and any(encoder.has_control_token(text[a:b]) for a, b in contents):
            maps[place] = _in_parts(encoder, text, contents)
        else:
            whole.append(place)
    encodings = encoder.encodings([rendered[place][0] for place in whole])
    for place, encoding in zip(whole, encodings, strict=True):
        maps[place] = TokenMap(list(encoding.ids), encoding)
    return [_with_one_bos(encoder, tokens) for tokens in maps if tokens is not None]


def _in_parts(encoder: TextEncoder, text: str, contents: list[tuple[int, int]]) -> TokenMap:
    """Cut at the template's own control tokens; between them nothing is control."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for match in [*encoder.control_tokens_in(text), None]:
        if match is not None and any(a < match.end() and b > match.start() for a, b in contents):
            continue
        end = len(text) if match is None else match.start()
        if end > position:
            encoding = encoder.encodings([text[position:end]], parse=False)[0]
            ids += encoding.ids
            offsets += [(a + position, b + position) for a, b in encoding.offsets]
        if match is not None:
            ids.append(encoder.control_ids[match.group()])
            offsets.append((match.start(), match.end()))
            position = match.end()
    return TokenMap(ids, offsets=offsets)


def _with_one_bos(encoder: TextEncoder, tokens: TokenMap) -> TokenMap:
    """Exactly one BOS, decided from the ids: added where the tokenizer adds one to any text and the template did not."""
    bos = encoder.bos_id
    if bos is None or not encoder.adds_bos or tokens.ids[:1] == [bos]:
        return tokens
    return TokenMap([bos, *tokens.ids], tokens.encoding, tokens.offsets, shift=1)
