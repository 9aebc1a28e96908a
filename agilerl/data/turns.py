"""Where a chat template puts each turn: found by rendering with sentinels, checked by rendering prefixes.

A conversation is rendered twice: as it is, and with every piece of its own text replaced by a sentinel. If putting the
texts back in the second rendering gives the first, the sentinels say exactly where each text stands. Independently, the
rendering of the turns before an answer, with the assistant's turn opened, must be a prefix of the whole and end where the
answer begins. Both must agree. The sentinel rendering depends only on the *shape* of a conversation (roles, surrounding
whitespace, thinking tags, tool calls), so it is made and checked once per shape; the real rendering is made for each row.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from agilerl.data.records import Message, RowFault
from agilerl.data.template import Template

__all__ = ["Shape", "Skeleton", "TurnFinder", "TurnRange", "sentinel_messages"]

_THINK = re.compile(r"(</?think(?:ing)?>)")
_SENTINEL = re.compile(r"Zq(\d+)x(\d+)xqZ")
# Fields whose text is the turn's own; everything else about a message belongs to its shape.
_TEXT_FIELDS = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True)
class TurnRange:
    """Where one trained turn stands in a rendering, in characters."""

    message: int
    start: int
    """First character that the model has to write."""
    end: int
    """After the stop token, which belongs to the turn."""
    stop: str
    """The text that ends the turn; empty where the template ends it with nothing."""
    is_control: bool
    """Whether ``stop`` ends with a control token."""


@dataclass
class Shape:
    """A conversation with its own texts taken out."""

    messages: list[Message]
    cores: list[tuple[str, str]] = field(default_factory=list)
    """(sentinel, text) in order of appearance in the messages."""


def sentinel_messages(messages: list[Message]) -> Shape:
    """Replace each text of each turn by a sentinel; whitespace around it and thinking tags of assistants stay."""
    shape = Shape([])
    for index, message in enumerate(messages):
        copy = dict(message)
        count = 0
        splits = message.get("role") == "assistant"  # nobody else thinks: elsewhere a thinking tag is text
        for name in _TEXT_FIELDS:
            value = message.get(name)
            if isinstance(value, str):
                copy[name], count = _replace(value, index, count, shape.cores, splits)
            elif isinstance(value, list):
                parts = []
                for part in value:
                    if isinstance(part, dict) and isinstance(part.get("text"), str):
                        text, count = _replace(part["text"], index, count, shape.cores, splits)
                        part = {**part, "text": text}
                    parts.append(part)
                copy[name] = parts
        shape.messages.append(copy)
    return shape


def _replace(text: str, message: int, count: int, cores: list[tuple[str, str]], splits: bool) -> tuple[str, int]:
    parts = _THINK.split(text) if splits and "think" in text else [text]
    for place, part in enumerate(parts):
        core = part.strip()
        if place % 2 or not core:
            continue
        sentinel = f"Zq{message}x{count}xqZ"
        cores.append((sentinel, core))
        lead = len(part) - len(part.lstrip())
        parts[place] = part[:lead] + sentinel + part[lead + len(core) :]
        count += 1
    return "".join(parts), count


class Skeleton:
    """The analysed rendering of one shape.

    Attributes:
        text: The rendering with sentinels.
        turns: Trained turns, in positions of ``text``.
        suffix: What has to follow the rendering so that its last answer ends (templates that close a turn late).
        missing: Messages with a text of which nothing is rendered.
    """

    def __init__(self, text: str, num_messages: int) -> None:
        self.text = text
        self.turns: list[TurnRange] = []
        self.suffix = ""
        self.missing: set[int] = set()
        matches = list(_SENTINEL.finditer(text))
        self.slots = [(match.group(), int(match.group(1))) for match in matches]
        ends = [match.end() for match in matches]
        starts = [match.start() for match in matches]
        self.literal_starts = [0, *ends]
        self.literals = [text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True)]
        self.places: dict[int, tuple[int, int]] = {}
        for match in matches:
            index = int(match.group(1))
            first = self.places.get(index, (match.start(), 0))[0]
            self.places[index] = (first, match.end())
        self.num_messages = num_messages

    def fill(self, cores: dict[str, str]) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Put texts back: the rendering, where each literal starts in it, and where each text stands."""
        parts, starts, contents, position = [self.literals[0]], [0], [], len(self.literals[0])
        for (sentinel, _), literal in zip(self.slots, self.literals[1:], strict=True):
            core = cores[sentinel]
            contents.append((position, position + len(core)))
            position += len(core)
            starts.append(position)
            parts += (core, literal)
            position += len(literal)
        return "".join(parts), starts, contents

    def to_real(self, position: int, real_starts: list[int]) -> int:
        """A position of the skeleton as one of the filled rendering; it never lies inside a sentinel."""
        piece = bisect_right(self.literal_starts, position) - 1
        return real_starts[piece] + position - self.literal_starts[piece]


class TurnFinder:
    """Finds the trained turns of one rendering, each twice: by its text and by rendering prefixes.

    Args:
        template: Renders the prefixes.
        controls: Matches control tokens.
        text: The rendering.
        messages: Its conversation.
        tools: Its tool schemas.
        places: Where the text of each message stands in ``text``, as far as it appears.
    """

    def __init__(
        self,
        template: Template,
        controls: re.Pattern[str] | None,
        text: str,
        messages: list[Message],
        tools: list[Any] | None,
        places: dict[int, tuple[int, int]],
    ) -> None:
        self._template, self._controls = template, controls
        self._text, self._messages, self._tools, self._places = text, messages, tools, places

    def find(self, index: int) -> TurnRange:
        """The range of turn ``index``.

        Raises:
            RowFault: The two ways do not agree, or the template rewrites what was rendered before.
        """
        start = self._start(index)
        until = self._template.one(self._messages[: index + 1], self._tools)
        text_end = self._places[index][1] if index in self._places else start
        own_end = max(_common_prefix(self._text, until), text_end)
        return self._end(index, start, text_end, own_end)

    def _start(self, index: int) -> int:
        """Where the model begins to write turn ``index``."""
        text, message, place = self._text, self._messages[index], self._places.get(index)
        before = self._template.one(self._messages[:index], self._tools)
        if message.get("role") != "assistant":
            if place is None:
                raise RowFault("template_drops_turn", f"has turn {index}, of which the chat template renders nothing")
            return place[0]
        if index == 0:
            raise RowFault(
                "assistant_first",
                "opens with the assistant's turn, to which no prompt leads; put a turn before it, or give it train: false",
            )
        opened = self._template.one(self._messages[:index], self._tools, generate=True)
        is_prefix = text.startswith(opened)
        if place is None:
            if not is_prefix:
                raise RowFault("template_rewrites", f"has turn {index} rendered differently once later turns follow it")
            return len(opened)
        own = _think_start(text, place[0]) if _thinks(message) else place[0]
        if not is_prefix:
            # Earlier turns were rewritten, but the opening of this one must still be what generation will open.
            opening = opened[len(before) :].strip() if opened.startswith(before) else ""
            if not text[:own].rstrip().endswith(opening) or not opening:
                raise RowFault(
                    "template_rewrites",
                    f"has turn {index} rendered after something other than the opening of an answer",
                )
            return own
        start = max(own - _lead(message, text, own), len(opened))
        between = _THINK.sub("", text[len(opened) : start]).strip()
        if between:
            raise RowFault(
                "template_disagrees", f"has {between!r} between the opening of turn {index} and its own text"
            )
        return start

    def _end(self, index: int, start: int, text_end: int, own_end: int) -> TurnRange:
        """The range from ``start`` to the stop token, which stands between the turn's text and the next turn."""
        text, has_calls = self._text, bool(self._messages[index].get("tool_calls"))
        first = start if has_calls else text_end
        region = text[first:own_end]
        found = list(self._controls.finditer(region)) if self._controls else []
        if has_calls:  # calls may be wrapped in control tokens of their own: the last one ends the turn
            found = found[-1:] if found and region.rstrip().endswith(found[-1].group()) else []
        if found:
            return TurnRange(index, start, first + found[0].end(), region[found[0].start() : found[0].end()], True)
        if region.strip():
            return TurnRange(index, start, first + len(region.rstrip()), "" if has_calls else region.strip(), False)
        # Nothing closes the turn before the next one starts: the tag of the next one does.
        late = self._controls.match(text, own_end) if self._controls else None
        if late:
            return TurnRange(index, start, late.end(), late.group(), True)
        is_last = index + 1 == len(self._messages)
        return TurnRange(index, start, text_end if is_last else self._late_text_end(index, own_end), "", False)

    def _late_text_end(self, index: int, own_end: int) -> int:
        """End of a plain-text tag that follows an answer directly (no line break); else of the break."""
        following = [place[0] for message, place in self._places.items() if message > index]
        if not following or (self._text[:own_end].rstrip() != self._text[:own_end]):
            return own_end
        tag = self._text[own_end : min(following)]
        return own_end + len(tag.rstrip())


def _thinks(message: Message) -> bool:
    content = message.get("content")
    return bool(
        message.get("reasoning_content")
        or message.get("thinking")
        or (isinstance(content, str) and _THINK.search(content))
    )


def _think_start(text: str, position: int) -> int:
    """Position of the thinking tag that opens right before ``position``, or ``position``."""
    opened = re.search(r"<think(?:ing)?>\s*$", text[:position])
    return opened.start() if opened else position


def _lead(message: Message, text: str, position: int) -> int:
    """Length of the whitespace before ``position`` that is the message's own."""
    content = message.get("content")
    if not isinstance(content, str):
        return 0
    lead = content[: len(content) - len(content.lstrip())]
    return len(lead) if lead and text[:position].endswith(lead) else 0


def _common_prefix(a: str, b: str) -> int:
    if a.startswith(b):
        return len(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
