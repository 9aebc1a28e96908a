"""Chats to examples: what counts as a trained token is decided here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from agilerl.data.adapt import TemplateAdapter
from agilerl.data.encoder import TextEncoder
from agilerl.data.fields import damage_in
from agilerl.data.records import Chat, Example, Message, Reply, RowFault, Span
from agilerl.data.segments import Place, TokenMap, encode_rendered
from agilerl.data.template import TAG, Conversation, Template
from agilerl.data.turns import Skeleton, TurnFinder, TurnRange, sentinel_messages
from agilerl.errors import DataError

__all__ = ["ChatRenderer", "ChatSettings", "TrainOn"]

TrainOn = Literal["all", "last", "marked"]

# Keys of a message that speak to us and not to the template.
_MARKS = ("train", "weight")
_MAX_SHAPES = 4096


@dataclass(frozen=True)
class ChatSettings:
    """Which turns of a chat are trained.

    Args:
        train_on: ``all`` turns of the trained roles, the ``last`` one only, or those ``marked`` with ``train`` or ``weight``.
        roles: Whose turns are trained.
    """

    train_on: TrainOn = "all"
    roles: tuple[str, ...] = ("assistant",)

    def __post_init__(self) -> None:
        if self.train_on not in get_args(TrainOn):
            raise DataError(f"train_on is {self.train_on!r}; it must be one of {', '.join(get_args(TrainOn))}.")

    def weights(self, messages: Sequence[Message], first: int = 0) -> dict[int, float]:
        """Weight of each trained turn, by its index."""
        turns = [
            index for index, message in enumerate(messages) if message.get("role") in self.roles and index >= first
        ]
        if self.train_on == "last":
            turns = turns[-1:]
        chosen: dict[int, float] = {}
        for index in turns:
            message = messages[index]
            weight = message.get("weight")
            if weight is not None and (
                isinstance(weight, bool) or not isinstance(weight, int | float) or weight != weight
            ):
                raise RowFault("bad_weight", f"has weight {weight!r} in turn {index}; it must be a number")
            is_marked = message.get("train") is True or (weight is not None and message.get("train") is not False)
            is_trained = is_marked if self.train_on == "marked" else message.get("train") is not False
            if is_trained and weight != 0:
                chosen[index] = 1.0 if weight is None else float(weight)
        return chosen


class ChatRenderer:
    """Renders chats, finds their trained turns and tokenises them.

    Args:
        encoder: The tokenizer.
        template: The chat template; None for a split without chats (a chat is then an error that says what to do).
        settings: Which turns are trained.
    """

    def __init__(self, encoder: TextEncoder, template: Template | None, settings: ChatSettings | None = None) -> None:
        self.encoder = encoder
        self._template = template
        self.settings = settings or ChatSettings()
        self._skeletons: dict[Any, Skeleton | RowFault] = {}
        added = getattr(encoder.tokenizer, "added_tokens_decoder", None) or {}
        names = {str(token) for token in added.values()} | set(encoder.control_ids)
        # Thinking and tool tags are written by the model in mid-turn; they do not end it.
        names = {name for name in names if name.strip() and not TAG.fullmatch(name)}
        ordered = sorted(names, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @property
    def template(self) -> Template:
        """The chat template.

        Raises:
            DataError: There is none.
        """
        if self._template is None:
            self._template = Template(self.encoder.tokenizer)
        return self._template

    @cached_property
    def adapter(self) -> TemplateAdapter:
        """Makes up for what the template cannot do."""
        return TemplateAdapter(self.template)

    @property
    def notices(self) -> list[str]:
        """What was done to make up for the template, one sentence each."""
        return list(self.adapter.notices) if "adapter" in self.__dict__ else []

    def prompt(self, chat: Chat) -> list[int]:
        """Ids of a conversation with the assistant's next turn opened, as training puts them before an answer.

        Raises:
            RowFault: The template refuses the conversation.
        """
        chat = self.adapter.adapt(chat)
        (outcome,) = self._render([(self._clean(chat.messages), chat.tools)], generate=True)
        if isinstance(outcome, RowFault):
            raise outcome
        if self.encoder.backend is None:  # such a tokenizer cannot be trained on chats, but may be asked
            return self.encoder.encode([outcome[0]], parse=True)[0]
        return self._tokenise([outcome[:2]])[0].ids

    def replies(self, replies: Sequence[Reply]) -> list[Example | RowFault]:
        """Chats as prompts, each followed by a plain response and one EOS."""
        encoder = self.encoder
        if encoder.eos_id is None:
            raise DataError("The tokenizer has no EOS token, which has to end every response; set tokenizer.eos_token.")
        adapted = [self.adapter.adapt(Chat(reply.messages, reply.tools)) for reply in replies]
        rendered = self._render([(self._clean(chat.messages), chat.tools) for chat in adapted], generate=True)
        bodies = [_without(reply.response, encoder.eos_text) for reply in replies]
        prompts = self._tokenise([(text, contents) for text, contents, _ in _good(rendered)])
        responses = encoder.encode(bodies)
        rows: list[Example | RowFault] = []
        maps = iter(prompts)
        for reply, body, response, outcome in zip(replies, bodies, responses, rendered, strict=True):
            if isinstance(outcome, RowFault):
                rows.append(outcome)
                continue
            prompt = next(maps).ids
            ids = np.array([*prompt, *response, encoder.eos_id], dtype=np.int32)
            spans = (Span(len(prompt), len(ids), 1.0),)
            head = self._head_length(reply.messages, prompt)
            notes = self._notes([*reply.messages, {"role": "assistant", "content": body}])
            rows.append(Example(ids, spans, len(prompt), outcome[0], reply.response, head_length=head, notes=notes))
        return rows

    def chats(self, chats: Sequence[Chat]) -> list[Example | RowFault]:
        """Whole conversations, rendered as the template renders them."""
        prepared: list[tuple[list[Message], list[Any] | None, dict[int, float]] | RowFault] = []
        oddities: list[tuple[str, ...]] = []
        for chat in chats:
            oddities.append(_odd_turns(chat.messages))
            try:
                chat = self.adapter.adapt(chat)
                weights = self.settings.weights(chat.messages, chat.first_trained)
                if not weights:
                    roles = ", ".join(str(message.get("role")) for message in chat.messages)
                    raise RowFault("no_trained_turn", f"has no turn to train on; its roles are {roles}")
                prepared.append((self._clean(chat.messages), chat.tools, weights))
            except RowFault as fault:
                prepared.append(fault)
        good = [item for item in prepared if not isinstance(item, RowFault)]
        rendered = iter(
            self._render([(messages, tools) for messages, tools, _ in good], turns=[set(w) for _, _, w in good])
        )
        located = [item if isinstance(item, RowFault) else next(rendered) for item in prepared]
        tokenised = iter(self._tokenise([(text, contents) for text, contents, _ in _good(located)]))
        rows: list[Example | RowFault] = []
        for item, outcome, odd in zip(prepared, located, oddities, strict=True):
            if isinstance(item, RowFault) or isinstance(outcome, RowFault):
                rows.append(
                    outcome if isinstance(outcome, RowFault) else RowFault("template_error", "was not rendered")
                )
            else:
                example = self._example(item[0], item[2], outcome[0], outcome[2], next(tokenised))
                rows.append(replace(example, notes=(*example.notes, *odd)))
        return rows

    def _example(
        self, messages: list[Message], weights: dict[int, float], text: str, turns: list[TurnRange], tokens: TokenMap
    ) -> Example:
        spans, end = [], 0
        for turn in turns:
            first, last = tokens.span(turn.start, turn.end)
            first = max(first, end)
            if last > first:
                spans.append(Span(first, last, weights[turn.message]))
                end = last
        prompt_length = spans[0].start if spans else len(tokens.ids)
        cut = turns[0].start if turns else len(text)
        ids = np.array(tokens.ids, dtype=np.int32)
        head = min(self._head_length(messages, tokens.ids), prompt_length)
        notes = self._notes(messages)
        return Example(ids, tuple(spans), prompt_length, text[:cut], text[cut:], head_length=head, notes=notes)

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        """Messages without our marks, and answers without a stop token that they spell themselves."""
        cleaned = []
        for message in messages:
            message = {key: value for key, value in message.items() if key not in _MARKS and value is not None}
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                message["content"] = _without(message["content"], self.encoder.eos_text)
            cleaned.append(message)
        return cleaned

    def _render(
        self, chats: Sequence[Conversation], *, generate: bool = False, turns: Sequence[set[int]] | None = None
    ) -> list[tuple[str, list[Place], list[TurnRange]] | RowFault]:
        """Text, places of the rows' own text and trained turns of each conversation."""
        results: list[tuple[str, list[Place], list[TurnRange]] | RowFault] = []
        texts = self.template.render(chats, generate=generate)
        for place, (text, chat) in enumerate(zip(texts, chats, strict=True)):
            if isinstance(text, RowFault):
                results.append(text)
                continue
            try:
                results.append(self._locate(text, chat, generate, turns[place] if turns else set()))
            except RowFault as fault:
                results.append(fault)
        return results

    def _locate(
        self, text: str, chat: Conversation, generate: bool, turns: set[int]
    ) -> tuple[str, list[Place], list[TurnRange]]:
        messages, tools = chat
        shape = sentinel_messages(messages)
        key = (repr(shape.messages), repr(tools) if tools else "", generate, tuple(sorted(turns)))
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            if len(self._skeletons) >= _MAX_SHAPES:
                self._skeletons.clear()
            try:
                skeleton = self._analyse(shape.messages, tools, generate, turns)
            except RowFault as fault:
                skeleton = fault
            self._skeletons[key] = skeleton
        if not isinstance(skeleton, RowFault):
            filled, starts, contents = skeleton.fill(dict(shape.cores))
            places = [
                Place(start, end, messages[index].get("role") == "assistant")
                for (start, end), (_, index) in zip(contents, skeleton.slots, strict=True)
            ]
            if filled == text:
                real = [
                    TurnRange(
                        turn.message,
                        skeleton.to_real(turn.start, starts),
                        skeleton.to_real(turn.end, starts),
                        turn.stop,
                        turn.is_control,
                    )
                    for turn in skeleton.turns
                ]
                return text + skeleton.suffix, places, real
        return self._locate_directly(text, messages, tools, turns)

    def _analyse(self, messages: list[Message], tools: list[Any] | None, generate: bool, turns: set[int]) -> Skeleton:
        skeleton = Skeleton(self.template.one(messages, tools, generate=generate), len(messages))
        skeleton.missing = {
            index for index, message in enumerate(messages) if _texts([message]) and index not in skeleton.places
        }
        finder = TurnFinder(self.template, self._controls, skeleton.text, messages, tools, skeleton.places)
        skeleton.turns = [finder.find(index) for index in sorted(turns)]
        skeleton.suffix = self._closing(skeleton.text, messages, tools, skeleton.turns)
        skeleton.turns = self._with_suffix(skeleton.text, skeleton.turns, skeleton.suffix)
        return skeleton

    def _locate_directly(
        self, text: str, messages: list[Message], tools: list[Any] | None, turns: set[int]
    ) -> tuple[str, list[Place], list[TurnRange]]:
        """For a template whose output depends on the texts themselves: look for the texts in the rendering."""
        places: dict[int, tuple[int, int]] = {}
        position = 0
        for index, message in enumerate(messages):
            for core in _cores(message):
                found = text.find(core, position)
                if found >= 0:
                    places[index] = (places.get(index, (found, 0))[0], found + len(core))
                    position = found + len(core)
        if self._forges(messages):
            raise RowFault("control_token", "contains a control token, and the chat template rewrites its text")
        for index in turns:
            if index not in places and _texts([messages[index]]):
                raise RowFault(
                    "template_rewrites", f"has turn {index} rewritten by the chat template beyond recognition"
                )
        finder = TurnFinder(self.template, self._controls, text, messages, tools, places)
        found_turns = [finder.find(index) for index in sorted(turns)]
        suffix = self._closing(text, messages, tools, found_turns)
        return text + suffix, [], self._with_suffix(text, found_turns, suffix)

    def _closing(self, text: str, messages: list[Message], tools: list[Any] | None, turns: list[TurnRange]) -> str:
        """What ends the last answer where the template leaves it open: the tag that would close it, or EOS."""
        if (
            not turns
            or turns[-1].message != len(messages) - 1
            or turns[-1].stop
            or messages[-1].get("role") != "assistant"
        ):
            return ""
        with_next = self.template.render([([*messages, {"role": "user", "content": "Zq"}], tools)])[0]
        if isinstance(with_next, str) and with_next.startswith(text) and self._controls:
            late = self._controls.match(with_next[len(text) :])
            if late:
                return late.group()
        return self.encoder.eos_text

    def _with_suffix(self, text: str, turns: list[TurnRange], suffix: str) -> list[TurnRange]:
        if not suffix:
            return turns
        last = turns[-1]
        return [*turns[:-1], TurnRange(last.message, last.start, len(text) + len(suffix), suffix, True)]

    def _tokenise(self, rendered: Sequence[tuple[str, list[Place]]]) -> list[TokenMap]:
        return encode_rendered(self.encoder, rendered)

    def _head_length(self, messages: Sequence[Message], ids: Sequence[int]) -> int:
        """Tokens that a cut from the left keeps: BOS and the system turn."""
        bos = int(bool(ids) and ids[0] == self.encoder.bos_id and self.encoder.bos_id is not None)
        if messages[0].get("role") != "system" or len(messages) < 2:
            return bos
        head = self.template.render([([messages[0]], None)])[0]
        if isinstance(head, RowFault):
            return bos
        system = self._tokenise([(head, [])])[0].ids
        same = 0
        while same < min(len(system), len(ids)) and system[same] == ids[same]:
            same += 1
        return max(bos, same)

    def _notes(self, messages: Sequence[Message]) -> tuple[str, ...]:
        forged = ("control_token",) if self._forges(messages) else ()
        return (*forged, *damage_in(_texts(messages)))

    def _forges(self, messages: Sequence[Message]) -> bool:
        """Whether any text spells a control token, or one that no assistant wrote a tag."""
        return any(
            self.encoder.has_control_token(text, is_answer=message.get("role") == "assistant")
            for message in messages
            for text in _texts([message])
        )


def _odd_turns(messages: Sequence[Message]) -> tuple[str, ...]:
    """What is unusual about who speaks when."""
    roles = [str(message.get("role")) for message in messages]
    notes = []
    if roles[-1] in ("user", "system"):
        notes.append("ends_with_question")
    if any(a == b and a in ("user", "assistant") for a, b in pairwise(roles)):
        notes.append("repeated_speaker")
    if "system" in roles[1:]:
        notes.append("late_system")
    asked = 0
    for message in messages:
        asked += len(message.get("tool_calls") or ())
        if message.get("role") == "tool":
            asked -= 1
            if asked < 0:
                notes.append("result_without_call")
                break
    return tuple(notes)


def _good(items: Sequence[Any]) -> list[Any]:
    return [item for item in items if not isinstance(item, RowFault)]


def _without(text: str, stop: str) -> str:
    while stop and text.rstrip().endswith(stop):
        text = text.rstrip()[: -len(stop)]
    return text


def _texts(messages: Sequence[Message]) -> list[str]:
    texts = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in [*parts, message.get("reasoning_content"), message.get("thinking")]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str) and text.strip():
                texts.append(text)
    return texts


def _cores(message: Message) -> list[str]:
    """The texts of a message in the order in which a template may render them, thinking first."""
    return [text for _, text in sentinel_messages([message]).cores]
