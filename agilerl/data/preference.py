"""Preference pairs in all their shapes: a prompt, given or implied, with a better and a worse answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agilerl.data.conversation import looks_like_turns, normal_messages, normal_tools
from agilerl.data.fields import as_text, text_of
from agilerl.data.formats import FormatOptions, answer_records
from agilerl.data.records import Chat, Comparison, Message, Pair, Row, RowFault

__all__ = ["PreferenceFormat"]

_LAST_TURN = "\n\nAssistant:"


@dataclass(frozen=True)
class PreferenceFormat:
    """``prompt``, ``chosen`` and ``rejected``, each text or turns.

    Answers that are whole conversations carry their prompt in themselves: the turns that both share. Transcripts in one text
    ("Human: ... Assistant: ...") are cut after the last opening that both share.
    """

    options: FormatOptions
    columns: dict[str, str]
    name: str = "preference"

    def convert(self, row: Row) -> list[Comparison]:
        """One comparison."""
        chosen, rejected = self.columns["chosen"], self.columns["rejected"]
        for column in (chosen, rejected):
            if column not in row:
                raise RowFault("missing_field", f"has no '{column}'")
        tools = normal_tools(row.get("tools"), "tools", is_columnar=self.options.is_columnar)
        if self._is_conversation(row[chosen]) or self._is_conversation(row[rejected]):
            return [self._from_conversations(row, chosen, rejected, tools)]
        prompt = self.columns.get("prompt", "prompt")
        if self.columns.get("messages") in row:  # earlier turns in one column, the two next turns in others
            prompt = self.columns["messages"]
        elif prompt not in row and self.columns.get("instruction") in row:
            row = row | {"prompt": self._instruction(row)}
            prompt = "prompt"
        elif prompt not in row:
            return [self._from_transcripts(row, chosen, rejected)]
        sides = [answer_records(row, prompt, column, self.options, tools=tools) for column in (chosen, rejected)]
        return [self._pair(*sides)]

    def _is_conversation(self, value: Any) -> bool:
        """Whether an answer holds its prompt too: its first turn is not the assistant's."""
        if not looks_like_turns(value):
            return False
        return normal_messages(value[:1], "chosen", self.options.roles)[0]["role"] != "assistant"

    def _from_conversations(self, row: Row, chosen: str, rejected: str, tools: list[Any] | None) -> Comparison:
        sides = [
            self.options.with_system(
                normal_messages(row[column], column, self.options.roles, is_columnar=self.options.is_columnar)
            )
            for column in (chosen, rejected)
        ]
        shared = 0
        while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
            shared += 1
        # Identical answers share everything; the prompt still ends before the last answer.
        shared = min(
            shared, *(_last_answer(side, column) for side, column in zip(sides, (chosen, rejected), strict=True))
        )
        if not shared:
            raise RowFault(
                "no_prompt", "has two conversations that share no opening turn, so there is no common prompt"
            )
        return self._pair(*(Chat(side, tools, first_trained=shared) for side in sides))

    def _from_transcripts(self, row: Row, chosen: str, rejected: str) -> Comparison:
        a, b = text_of(row, chosen), text_of(row, rejected)
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        opening = a[:same].rfind(_LAST_TURN)
        if opening < 0:
            raise RowFault(
                "no_prompt", "has no 'prompt', and its two answers share no 'Assistant:' opening to take one from"
            )
        cut = opening + len(_LAST_TURN)
        for text, column in ((a, chosen), (b, rejected)):
            as_text(text[cut:], column)
        return Comparison(Pair(a[:cut], a[cut:]), Pair(b[:cut], b[cut:]))

    def _instruction(self, row: Row) -> str:
        instruction, given = text_of(row, self.columns["instruction"]), row.get("input")
        return f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction

    def _pair(self, chosen: Any, rejected: Any) -> Comparison:
        if type(chosen) is not type(rejected):
            raise RowFault("not_messages", "has one answer as text and the other as messages; use one form for both")
        return Comparison(chosen, rejected)


def _last_answer(messages: list[Message], column: str) -> int:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowFault("no_trained_turn", f"has no assistant turn in '{column}'")
    return answers[-1]
