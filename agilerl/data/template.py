"""One chat template and how it is run: batches of conversations to text, with errors that name the turn at fault."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agilerl.data.records import Message, RowFault
from agilerl.errors import DataError

__all__ = ["TAG", "Conversation", "Template"]

TAG = re.compile(r"</?(think|thinking|tool_\w+)>")
"""Tags that a model writes itself, in mid-turn."""

Conversation = tuple[list[Message], list[Any] | None]
"""Messages and tool schemas."""

# Keys of apply_chat_template that this room decides itself.
_OURS = {"tokenize": False, "add_generation_prompt": True, "continue_final_message": False, "return_dict": False}


class Template:
    """Renders conversations with a tokenizer's own chat template, or with ``source`` in its place.

    Args:
        tokenizer: Runs the template and fills in its special tokens.
        source: Jinja text used instead of the tokenizer's template; None: the tokenizer's own.
        kwargs: Variables for the template, such as ``enable_thinking``.

    Raises:
        DataError: There is no template, or ``kwargs`` sets something that is not the caller's to set.
    """

    def __init__(self, tokenizer: Any, source: str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
        if source is None and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "The tokenizer has no chat template, so rows with messages cannot be rendered; pass chat_template='chatml' "
                "(or another name or file), or set tokenizer.chat_template."
            )
        self.tokenizer = tokenizer
        self.source = source
        self.kwargs = dict(kwargs or {})
        for key, ours in _OURS.items():
            if self.kwargs.pop(key, ours) != ours:
                raise DataError(
                    f"chat_template_kwargs sets {key!r}, which is not a variable of the template; leave it out."
                )
        self.default_tools: list[Any] | None = self.kwargs.pop("tools", None)
        self.reads_parts = False
        probe = self.render([([{"role": "user", "content": "zqprobe"}], None)])[0]
        if isinstance(probe, RowFault) or "zqprobe" not in probe:
            self.reads_parts = True  # kept only where it helps: templates of vision-language models
            probe = self.render([([{"role": "user", "content": "zqprobe"}], None)])[0]
            self.reads_parts = isinstance(probe, str) and "zqprobe" in probe

    @property
    def identity(self) -> str:
        """Everything about the template that decides its output, for cache keys."""
        own = getattr(self.tokenizer, "chat_template", None)
        return json.dumps(
            [self.source, own if self.source is None else None, self.kwargs, self.default_tools], default=str
        )

    @cached_property
    def markers(self) -> frozenset[str]:
        """Added tokens of the tokenizer that this template puts around turns, whether marked as special or not."""
        plain: list[Message] = [
            {"role": role, "content": f"zq{place}"}
            for place, role in enumerate(("system", "user", "assistant", "user", "assistant"))
        ]
        shown = [
            text
            for chat in (plain, plain[1:])
            for text in self.render([(chat, None), (chat[:-1], None)], generate=True)
            if isinstance(text, str)
        ]
        return frozenset(
            token for token in self._added_tokens if not TAG.fullmatch(token) and any(token in text for text in shown)
        )

    @cached_property
    def tags(self) -> frozenset[str]:
        """Further added tokens that this template spells, such as those around thoughts and tool calls."""
        source = self.source or getattr(self.tokenizer, "chat_template", None) or ""
        named = source.values() if isinstance(source, Mapping) else [source]
        spelled = {token for token in self._added_tokens if any(token in str(text) for text in named)}
        return frozenset(spelled - self.markers)

    @property
    def _added_tokens(self) -> list[str]:
        decoder = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        return [text for text in map(str, decoder.values()) if text.strip()]

    def render(self, chats: Sequence[Conversation], *, generate: bool = False) -> list[str | RowFault]:
        """The text of each conversation; ``generate`` opens the assistant's next turn."""
        results: list[str | RowFault] = [""] * len(chats)
        groups: dict[str, list[int]] = {}
        for place, (_, tools) in enumerate(chats):
            groups.setdefault(json.dumps(tools, default=str) if tools else "", []).append(place)
        for places in groups.values():
            tools = chats[places[0]][1] or self.default_tools
            try:
                texts = self._apply([chats[place][0] for place in places], tools, generate)
            except Exception:  # a template may raise anything; find out which conversation it was
                texts = [self._apply_one(chats[place][0], tools, generate) for place in places]
            for place, text in zip(places, texts, strict=True):
                results[place] = text
        return results

    def one(self, messages: list[Message], tools: list[Any] | None = None, *, generate: bool = False) -> str:
        """The text of one conversation.

        Raises:
            RowFault: The template refuses it.
        """
        result = self.render([(messages, tools)], generate=generate)[0]
        if isinstance(result, RowFault):
            raise result
        return result

    def _apply(self, chats: list[list[Message]], tools: list[Any] | None, generate: bool) -> Sequence[str | RowFault]:
        if not chats[0]:  # no turn yet: nothing is rendered before the first header
            return [""] * len(chats)
        return self.tokenizer.apply_chat_template(
            self._in_parts(chats),
            tools=tools,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=generate,
            **self.kwargs,
        )

    def _in_parts(self, chats: list[list[Message]]) -> list[list[Message]]:
        """Texts as lists of one part, for templates that read nothing else."""
        if not self.reads_parts:
            return chats
        return [
            [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in chat
            ]
            for chat in chats
        ]

    def _apply_one(self, chat: list[Message], tools: list[Any] | None, generate: bool) -> str | RowFault:
        try:
            return self._apply([chat], tools, generate)[0]
        except Exception as error:  # told to the user with the row's number
            roles = ", ".join(str(message.get("role")) for message in chat)
            return RowFault("template_error", f"is refused by the chat template ({error}); its roles are {roles}")
