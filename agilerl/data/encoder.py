"""A tokenizer as the rest of the room sees it: batches of text to ids, and the few facts that decide BOS and EOS."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from agilerl.errors import DataError

__all__ = ["TextEncoder"]


class TextEncoder:
    """Encodes text under one rule for control tokens, with the fast backend where the tokenizer has one.

    Args:
        tokenizer: Any tokenizer of transformers; an object that can be called like one also works.
        control_tokens: ``"text"`` reads a control token that a row's own text contains as ordinary characters;
            ``"parse"`` lets it become the control id, for rows that were rendered beforehand.
        markers: Added tokens that the chat template puts around turns. They are control tokens even where the tokenizer
            does not mark them as special.
        tags: Added tokens of thoughts and tools that the template knows: control where an assistant did not write them.
    """

    def __init__(
        self,
        tokenizer: Any,
        control_tokens: str = "text",
        *,
        markers: Collection[str] = (),
        tags: Collection[str] = (),
    ) -> None:
        if control_tokens not in ("text", "parse"):
            raise DataError(f"control_tokens is {control_tokens!r}; it must be 'text' or 'parse'.")
        self.tokenizer = tokenizer
        self.parses_control_tokens = control_tokens == "parse"
        self._markers = frozenset(markers)
        self._tags = frozenset(tags)
        self._unmarked: dict[frozenset[str], Any] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.backend = backend if getattr(tokenizer, "is_fast", False) and backend is not None else None

    @cached_property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return getattr(self.tokenizer, "eos_token_id", None)

    @cached_property
    def eos_text(self) -> str:
        """The end-of-sequence token as it looks in text."""
        return str(getattr(self.tokenizer, "eos_token", None) or "")

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, whether or not this tokenizer puts it there by itself."""
        return getattr(self.tokenizer, "bos_token_id", None)

    @cached_property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as it looks in text."""
        return str(getattr(self.tokenizer, "bos_token", None) or "")

    @cached_property
    def pad_id(self) -> int:
        """Id to fill with; any will do where there is none, since the mask hides it."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else (self.eos_id or 0)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether plain text gets a leading BOS from the tokenizer itself."""
        return self.bos_id is not None and self.plain_prefix[:1] == [self.bos_id]

    @cached_property
    def plain_prefix(self) -> list[int]:
        """Ids that the tokenizer puts before plain text (BOS, where it adds one)."""
        bare, full = self._one("a", special=False), self._one("a", special=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    @cached_property
    def _added(self) -> dict[str, tuple[int, Any]]:
        """Id and description of each added token, by text."""
        decoder = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        return {str(token): (int(index), token) for index, token in decoder.items()}

    @cached_property
    def tag_ids(self) -> dict[str, int]:
        """Tags that are control tokens in all texts but the assistant's own."""
        return {
            text: index
            for text, (index, _) in self._added.items()
            if text in self._tags and text not in self.control_ids
        }

    @cached_property
    def control_ids(self) -> dict[str, int]:
        """Control tokens of the tokenizer, by text."""
        found = {
            text: index
            for text, (index, token) in self._added.items()
            if getattr(token, "special", True) or text in self._markers
        }
        for text, index in ((self.eos_text, self.eos_id), (self.bos_text, self.bos_id)):
            if text and index is not None:
                found.setdefault(text, index)
        return found

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self.control_ids)

    @cached_property
    def _forged_pattern(self) -> re.Pattern[str] | None:
        return _any_of([*self.control_ids, *self.tag_ids])

    @cached_property
    def identity(self) -> str:
        """Everything about the tokenizer that decides ids, for cache keys."""
        if self.backend is not None:
            vocabulary = self.backend.to_str()
        else:
            vocabulary = (
                repr(sorted(self.tokenizer.get_vocab().items())) if hasattr(self.tokenizer, "get_vocab") else ""
            )
        named = repr((type(self.tokenizer).__name__, self.eos_id, self.bos_id, self.pad_id, self.parses_control_tokens))
        return hashlib.blake2b((vocabulary + named).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def control_tokens_in(self, text: str) -> Iterator[tuple[int, int, int, bool]]:
        """Every place where ``text`` spells a control token or a tag: start, end, id and whether it is a tag.

        Whitespace that the token takes in with it (``rstrip`` of Phi-3's, say) is part of the place.
        """
        for match in self._forged_pattern.finditer(text) if self._forged_pattern else ():
            name, (start, end) = match.group(), match.span()
            is_tag = name in self.tag_ids
            _, token = self._added.get(name, (0, None))
            if getattr(token, "lstrip", False):
                start = len(text[:start].rstrip())
            if getattr(token, "rstrip", False):
                end = len(text) - len(text[end:].lstrip())
            yield start, end, (self.tag_ids if is_tag else self.control_ids)[name], is_tag

    def has_control_token(self, text: str, *, is_answer: bool = True) -> bool:
        """Whether ``text`` spells a control token anywhere; one that no assistant wrote must spell no tag either."""
        pattern = self._control_pattern if is_answer else self._forged_pattern
        return pattern is not None and pattern.search(text) is not None

    def encode(self, texts: Sequence[str], *, special: bool = False, parse: bool | None = None) -> list[list[int]]:
        """Ids of each text.

        Args:
            texts: What to encode.
            special: Whether the tokenizer adds what it adds to plain text (BOS).
            parse: Whether control tokens in the text become control ids; None: as set for this encoder.
        """
        parse = self.parses_control_tokens if parse is None else parse
        if self.backend is None:
            return [self._one(text, special=special, parse=parse) for text in texts]
        with self._backend(parse, self._markers) as backend:
            encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
            ids = [encoding.ids for encoding in encode(list(texts), add_special_tokens=special)]
        return [self._without_trailing_eos(row) for row in ids] if special and self._appends_eos else ids

    def encodings(self, texts: Sequence[str], *, parse: bool = True) -> list[Any]:
        """Backend encodings with offsets; nothing is added, and control tokens and tags are ids unless told otherwise."""
        if self.backend is None:
            raise DataError(
                f"{type(self.tokenizer).__name__} has no fast backend, so it cannot say which token covers which "
                "character; chats need one (AutoTokenizer.from_pretrained(..., use_fast=True))."
            )
        with self._backend(parse, self._markers | self._tags) as backend:
            return backend.encode_batch(list(texts), add_special_tokens=False)

    @contextmanager
    def _backend(self, parse: bool, control: frozenset[str]) -> Iterator[Any]:
        backend = self.backend if parse else self._backend_for_text(control)
        assert backend is not None  # both callers looked
        before = (backend.encode_special_tokens, backend.truncation, backend.padding)
        backend.encode_special_tokens = not parse
        backend.no_truncation()
        backend.no_padding()
        try:
            yield backend
        finally:
            backend.encode_special_tokens = before[0]
            if before[1] is not None:
                backend.enable_truncation(**before[1])
            if before[2] is not None:
                backend.enable_padding(**before[2])

    def _backend_for_text(self, control: frozenset[str]) -> Any:
        """A backend that can be told to read all of ``control`` as text: it can be of special tokens only."""
        names = frozenset(
            name for name in control if name in self._added and not getattr(self._added[name][1], "special", True)
        )
        if not names or self.backend is None:
            return self.backend
        if names not in self._unmarked:
            described = json.loads(self.backend.to_str())
            for token in described["added_tokens"]:
                token["special"] = token["special"] or token["content"] in names
            self._unmarked[names] = type(self.backend).from_str(json.dumps(described))
        return self._unmarked[names]

    def _one(self, text: str, *, special: bool, parse: bool = True) -> list[int]:
        extra: dict[str, Any] = {}
        if not parse and hasattr(self.tokenizer, "split_special_tokens"):
            extra["split_special_tokens"] = True
        call: Callable[..., Any] = self.tokenizer
        ids = list(call(text, add_special_tokens=special, **extra)["input_ids"])
        # The tokenizer may be the one being asked whether it appends EOS, so do not ask `_appends_eos` here for "a".
        return self._without_trailing_eos(ids) if special else ids

    @cached_property
    def _appends_eos(self) -> bool:
        call: Callable[..., Any] = self.tokenizer
        return list(call("a", add_special_tokens=True)["input_ids"])[-1:] == [self.eos_id]

    def _without_trailing_eos(self, ids: list[int]) -> list[int]:
        """Drop an EOS that the tokenizer itself puts after a prompt: the end belongs to the response."""
        return ids[:-1] if self._appends_eos and ids and ids[-1] == self.eos_id else ids


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
