"""Reading one field of a row: what is there, or a sentence about what is wrong with it."""

from __future__ import annotations

from typing import Any

from agilerl.data.records import Message, Row, RowFault

__all__ = ["is_messages", "messages_of", "text_of"]

_MISSING = object()


def text_of(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    """The text in ``column``.

    Raises:
        RowFault: It is missing, null, empty or not text.
    """
    value = row.get(column, _MISSING)
    if value is _MISSING:
        raise RowFault("missing_field", f"has no '{column}'")
    return as_text(value, column, may_be_empty=may_be_empty)


def as_text(value: Any, column: str, *, may_be_empty: bool = False) -> str:
    """``value`` as text; ``column`` names it in the fault."""
    if value is None:
        raise RowFault("null_field", f"has a null '{column}'")
    if not isinstance(value, str):
        raise RowFault("not_text", f"has {_short(value)} ({type(value).__name__}) in '{column}', which is not text")
    if not may_be_empty and not value.strip():
        raise RowFault("empty_field", f"has an empty '{column}'" if not value else f"has only blanks in '{column}'")
    if any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False:
        raise RowFault("not_text", f"has half of a surrogate pair in '{column}', which is not a character")
    return value


def is_messages(value: Any) -> bool:
    """Whether ``value`` looks like a chat: a list of objects, or a single one."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def messages_of(value: Any, column: str) -> list[Message]:
    """A chat in the standard form, each turn with its role and (unless it calls tools) its text.

    Raises:
        RowFault: It is not one.
    """
    if not isinstance(value, list):
        raise RowFault(
            "not_messages", f"has {_short(value)} ({type(value).__name__}) in '{column}', not a list of messages"
        )
    if not value:
        raise RowFault("empty_field", f"has an empty list of messages in '{column}'")
    messages: list[Message] = []
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise RowFault("not_messages", f"has {_short(turn)} as turn {index} of '{column}', not a message")
        role = turn.get("role")
        if not isinstance(role, str) or not role:
            raise RowFault(
                "bad_role", f"has no role in turn {index} of '{column}'; its keys are {', '.join(map(str, turn))}"
            )
        content = turn.get("content")
        where = f"{column}[{index}].content"
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict):
                    raise RowFault("not_messages", f"has {_short(part)} in '{where}', not a part of a message")
        elif content is not None or not turn.get("tool_calls"):
            as_text(content, where, may_be_empty=bool(turn.get("tool_calls")) or role in ("tool", "system"))
        messages.append(dict(turn))
    return messages


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
