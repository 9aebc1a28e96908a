"""Turns as people store them (OpenAI, sharegpt, tool calls in several spellings) to messages a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agilerl.data.fields import as_text, short
from agilerl.data.records import Message, RowFault

__all__ = ["ROLES", "looks_like_turns", "normal_messages", "normal_tools", "without_nulls"]

ROLES: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "instruction": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "output": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
"""Names of speakers that are understood, and who they are."""

_ROLE_KEYS = ("role", "from", "speaker")
_TEXT_KEYS = ("content", "value", "text")


def looks_like_turns(value: Any) -> bool:
    """Whether ``value`` is a list of objects that each have a speaker."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and any(k in value[0] for k in _ROLE_KEYS)
    )


def normal_messages(
    value: Any, column: str, roles: Mapping[str, str] | None = None, *, is_columnar: bool = False
) -> list[Message]:
    """A chat in the standard form: ``role``, ``content``, ``tool_calls`` and whatever else a turn carries.

    Args:
        value: A list of turns.
        column: Names them in a fault.
        roles: Speakers' names and who they are, besides :data:`ROLES`.
        is_columnar: Nulls were filled in by columnar storage and mean nothing.

    Raises:
        RowFault: It is not a chat.
    """
    if isinstance(value, str):
        value = _json_list(value, column)
    if value is None:
        raise RowFault("null_field", f"has a null '{column}'")
    if not isinstance(value, list):
        raise RowFault(
            "not_messages", f"has {short(value)} ({type(value).__name__}) in '{column}', not a list of messages"
        )
    if not value:
        raise RowFault("empty_field", f"has an empty list of messages in '{column}'")
    return [_normal_turn(turn, index, column, roles or {}, is_columnar) for index, turn in enumerate(value)]


def _normal_turn(turn: Any, index: int, column: str, roles: Mapping[str, str], is_columnar: bool) -> Message:
    where = f"{column}[{index}]"
    if not isinstance(turn, dict):
        raise RowFault("not_messages", f"has {short(turn)} as turn {index} of '{column}', not a message")
    role = _speaker(turn, index, column, roles)
    text_key = next((key for key in _TEXT_KEYS if key in turn), None)
    content = turn.get(text_key) if text_key else None
    if text_key is None and not turn.get("tool_calls"):
        keys = ", ".join(map(str, turn))
        raise RowFault("missing_field", f"has no content in turn {index} of '{column}'; its keys are {keys}")
    message: Message = {"role": role}
    for key, value in turn.items():
        if key not in _ROLE_KEYS and key not in _TEXT_KEYS and value is not None:
            message[key] = without_nulls(value) if is_columnar else value
    if role == "function_call":
        call = content if isinstance(content, dict) else _json_object(as_text(content, f"{where}.{text_key}"), where)
        return message | {"role": "assistant", "tool_calls": _normal_calls([call], where)}
    if message.get("tool_calls"):
        message["tool_calls"] = _normal_calls(message["tool_calls"], where)
    else:
        message.pop("tool_calls", None)
    if isinstance(content, list):
        message["content"] = _normal_parts(content, f"{where}.{text_key}", is_columnar)
    elif content is not None or not message.get("tool_calls"):
        may_be_empty = bool(message.get("tool_calls")) or role in ("tool", "system")
        message["content"] = as_text(content, f"{where}.{text_key or 'content'}", may_be_empty=may_be_empty)
    return message


def _speaker(turn: dict[str, Any], index: int, column: str, roles: Mapping[str, str]) -> str:
    """Who says a turn, as a chat template calls them."""
    said = next((turn[key] for key in _ROLE_KEYS if turn.get(key) is not None), None)
    if not isinstance(said, str) or not said.strip():
        raise RowFault(
            "bad_role", f"has no role in turn {index} of '{column}'; its keys are {', '.join(map(str, turn))}"
        )
    role = roles.get(said) or ROLES.get(said.strip().lower())
    if role is None:
        raise RowFault(
            "bad_role",
            f"has the role {said!r} in turn {index} of '{column}'; known roles are {', '.join(ROLES)}, and the option "
            f"roles can map others (roles={{{said!r}: 'assistant'}})",
        )
    return role


def _normal_parts(parts: list[Any], where: str, is_columnar: bool) -> list[Any]:
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise RowFault("not_messages", f"has {short(parts)} in '{where}', which is neither text nor a list of parts")
    return [without_nulls(part) if is_columnar else part for part in parts]


def _normal_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as ``{"type": "function", "function": {"name", "arguments": object}}``."""
    if isinstance(calls, str):
        calls = _json_list(calls, f"{where}.tool_calls")
    if not isinstance(calls, list):
        raise RowFault("bad_tool_call", f"has {short(calls)} in '{where}.tool_calls', not a list of calls")
    normal = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowFault("bad_tool_call", f"has a tool call without a name in '{where}': {short(call)}")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json_object(arguments or "{}", f"{where}.tool_calls")
        if arguments is not None and not isinstance(arguments, dict):
            raise RowFault(
                "bad_tool_call",
                f"has tool call arguments in '{where}.tool_calls' that are not an object: {short(arguments)}",
            )
        rest = {key: value for key, value in call.items() if key in ("id",) and value is not None}
        normal.append(
            {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
        )
    return normal


def normal_tools(value: Any, column: str, *, is_columnar: bool = False) -> list[Any] | None:
    """Tool schemas, verbatim; a JSON text is read, and nulls that columnar storage filled in are taken out.

    Raises:
        RowFault: They are not a list of objects.
    """
    if isinstance(value, str):
        value = _json_list(value, column, "bad_tools") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault("bad_tools", f"has {short(value)} in '{column}', not a list of tool schemas")
    return without_nulls(value) if is_columnar else value


def without_nulls(value: Any) -> Any:
    """``value`` without the null members that a columnar file gives to objects that never had them."""
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(member) for member in value]
    return value


def _json_list(text: str, where: str, reason: str = "not_messages") -> list[Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowFault(reason, f"has text in '{where}' that is not JSON ({error.msg})") from None
    if not isinstance(value, list):
        raise RowFault(reason, f"has JSON in '{where}' that is not a list")
    return value


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowFault(
            "bad_tool_call", f"has tool call arguments in '{where}' that are not JSON ({error.msg})"
        ) from None
    if not isinstance(value, dict):
        raise RowFault("bad_tool_call", f"has tool call arguments in '{where}' that are not an object: {short(text)}")
    return value
