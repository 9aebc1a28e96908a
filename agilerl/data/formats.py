"""Layouts of rows, each a small class that turns a row into canonical rows; add one here and in :mod:`~agilerl.data.detect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from agilerl.data.conversation import normal_messages, normal_tools
from agilerl.data.fields import as_text, explode, short, text_of
from agilerl.data.records import Chat, Message, Pair, Record, Reply, Row, RowFault, Text, Tokens
from agilerl.errors import DataError

__all__ = [
    "AlpacaFormat",
    "ChatFormat",
    "Format",
    "FormatOptions",
    "PromptFormat",
    "TextFormat",
    "TokensFormat",
    "answer_records",
]

Render = Literal["auto", "chat", "plain"]


@dataclass(frozen=True)
class FormatOptions:
    """What a format needs to know besides the columns.

    Args:
        render: Whether plain prompts become a chat: ``chat`` yes, ``plain`` no; ``auto``: instructions (alpaca) do where there
            is a template, prompt and response strings do not.
        has_template: Whether there is a chat template.
        system: System turn put before a conversation that has none.
        roles: Further names of speakers and who they are.
        is_columnar: Rows come from columnar storage, which fills objects with nulls.
    """

    render: Render = "auto"
    has_template: bool = False
    system: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    is_columnar: bool = False

    def __post_init__(self) -> None:
        if self.render not in get_args(Render):
            raise DataError(f"render is {self.render!r}; it must be one of {', '.join(get_args(Render))}.")

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The conversation, opened by the system turn that was asked for."""
        if self.system is None or (messages and messages[0].get("role") == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


class Format(Protocol):
    """A layout of rows."""

    @property
    def name(self) -> str:
        """What the summary calls it."""
        ...

    @property
    def columns(self) -> dict[str, str]:
        """The column that plays each part."""
        ...

    def convert(self, row: Row) -> list[Record]:
        """Canonical rows of one record.

        Raises:
            RowFault: The record cannot be used.
        """
        ...


@dataclass(frozen=True)
class PromptFormat:
    """A prompt (text or chat) with a response (text or turns)."""

    options: FormatOptions
    columns: dict[str, str]
    name: str = "prompt_response"

    def convert(self, row: Row) -> list[Record]:
        """One canonical row, or one per item where a column path leads through a list."""
        if not any("." in path for path in self.columns.values()):
            return [self._one(row)]
        paths = {path: path for path in (*self.columns.values(), "tools", "system")}
        return [self._one(item) for item in explode(row, paths)]

    def _one(self, row: Row) -> Record:
        prompt, response = self.columns["prompt"], self.columns["response"]
        tools = normal_tools(row.get(self.columns.get("tools", "tools")), "tools", is_columnar=self.options.is_columnar)
        system = row.get(self.columns.get("system", "system"))
        return answer_records(row, prompt, response, self.options, tools=tools, system=system)


def answer_records(
    row: Row,
    prompt_column: str,
    response_column: str,
    options: FormatOptions,
    *,
    tools: list[Any] | None = None,
    system: Any = None,
) -> Pair | Reply | Chat:
    """The canonical row of a prompt and one answer to it."""
    prompt, response = row.get(prompt_column), row.get(response_column)
    if isinstance(prompt, list):
        messages = options.with_system(
            normal_messages(prompt, prompt_column, options.roles, is_columnar=options.is_columnar)
        )
        if isinstance(response, dict):
            response = [response]
        if isinstance(response, list):
            answer = normal_messages(response, response_column, options.roles, is_columnar=options.is_columnar)
            return Chat(messages + answer, tools, first_trained=len(messages))
        return Reply(messages, text_of(row, response_column), tools)
    text = text_of(row, prompt_column)
    if isinstance(response, list | dict):
        answer = response if isinstance(response, list) else [response]
        turns = normal_messages(answer, response_column, options.roles, is_columnar=options.is_columnar)
        messages = options.with_system([{"role": "user", "content": text}])
        return Chat(messages + turns, tools, first_trained=len(messages))
    answer_text = text_of(row, response_column)
    if options.render == "chat":
        opening = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
        messages = options.with_system([*opening, {"role": "user", "content": text}])
        return Chat([*messages, {"role": "assistant", "content": answer_text}], tools, first_trained=len(messages))
    return Pair(text, answer_text)


@dataclass(frozen=True)
class AlpacaFormat:
    """Instruction, optional input, output; optional system and history (pairs of earlier turns)."""

    options: FormatOptions
    columns: dict[str, str]
    name: str = "alpaca"

    plain_opening: ClassVar[str] = "Below is an instruction that describes a task"

    def convert(self, row: Row) -> list[Record]:
        """One canonical row per record, or per instance of a record."""
        return [self._one(item) for item in explode(row, self.columns)]

    def _one(self, row: Row) -> Record:
        instruction = text_of(row, "instruction")
        given = row.get("input")
        given = "" if given is None else as_text(given, "input", may_be_empty=True)
        output = text_of(row, "output")
        system = row.get("system")
        system = as_text(system, "system", may_be_empty=True) if system is not None else ""
        options = self.options
        if options.render == "chat" or (options.render == "auto" and options.has_template):
            messages: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
            for turn in self._history(row):
                messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
            user = f"{instruction}\n\n{given}" if given.strip() else instruction
            messages = options.with_system([*messages, {"role": "user", "content": user}])
            return Chat([*messages, {"role": "assistant", "content": output}])
        return Pair(self._plain(instruction, given, system or options.system or "", self._history(row)), output)

    def _history(self, row: Row) -> list[tuple[str, str]]:
        turns = row.get("history") or []
        if not isinstance(turns, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
            raise RowFault(
                "not_messages", f"has {short(turns)} in 'history', not a list of (instruction, response) pairs"
            )
        return [(as_text(a, "history"), as_text(b, "history")) for a, b in turns]

    def _plain(self, instruction: str, given: str, system: str, history: list[tuple[str, str]]) -> str:
        opening = system or (
            self.plain_opening
            + (", paired with an input that provides further context" if given.strip() else "")
            + ". Write a response that appropriately completes the request."
        )
        parts = [opening]
        for earlier, answer in history:
            parts += [f"### Instruction:\n{earlier}", f"### Response:\n{answer}"]
        parts.append(f"### Instruction:\n{instruction}")
        if given.strip():
            parts.append(f"### Input:\n{given}")
        return "\n\n".join(parts) + "\n\n### Response:\n"


@dataclass(frozen=True)
class ChatFormat:
    """A column of turns, in the spelling of OpenAI (role, content) or sharegpt (from, value)."""

    options: FormatOptions
    columns: dict[str, str]
    name: str = "messages"

    def convert(self, row: Row) -> list[Record]:
        """One canonical chat."""
        column = self.columns["messages"]
        if column not in row:
            raise RowFault("missing_field", f"has no '{column}'")
        messages = normal_messages(row[column], column, self.options.roles, is_columnar=self.options.is_columnar)
        system = row.get(self.columns.get("system", "system"))
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        tools = normal_tools(row.get(self.columns.get("tools", "tools")), "tools", is_columnar=self.options.is_columnar)
        return [Chat(self.options.with_system(messages), tools)]


@dataclass(frozen=True)
class TextFormat:
    """Plain text, all of it trained."""

    options: FormatOptions
    columns: dict[str, str]
    name: str = "text"

    def convert(self, row: Row) -> list[Record]:
        """One text."""
        return [Text(text_of(row, self.columns["text"]))]


@dataclass(frozen=True)
class TokensFormat:
    """Rows tokenised beforehand: ids, and ``weights`` or ``labels`` (-100: not trained) for each."""

    options: FormatOptions
    columns: dict[str, str]
    name: str = "tokens"

    def convert(self, row: Row) -> list[Record]:
        """One row of ids and weights."""
        ids = row.get(self.columns["ids"])
        if not isinstance(ids, list) or not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise RowFault("not_tokens", f"has {short(ids)} in '{self.columns['ids']}', not a list of token ids")
        weights, labels = row.get("weights"), row.get("labels")
        if weights is None and labels is not None:
            weights = [0.0 if label == -100 else 1.0 for label in labels]
            wrong = [i for i, label in enumerate(labels[: len(ids)]) if label not in (-100, ids[i])]
            if wrong:
                raise RowFault(
                    "bad_labels",
                    f"has label {labels[wrong[0]]} at token {wrong[0]}, which is neither -100 nor that token; labels are "
                    "not shifted here",
                )
        if weights is None:
            weights = [1.0] * len(ids)
        if not isinstance(weights, list) or len(weights) != len(ids):
            raise RowFault("bad_labels", f"has {len(ids)} ids but not as many weights or labels")
        if not all(isinstance(w, int | float) and w == w and abs(w) != float("inf") for w in weights):
            raise RowFault("bad_labels", "has a weight that is not a finite number")
        return [Tokens(ids, [float(weight) for weight in weights])]
