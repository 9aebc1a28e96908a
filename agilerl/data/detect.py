"""Which format a split's rows are in: from its columns and a few of its rows, or as the user says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from agilerl.data.conversation import looks_like_turns
from agilerl.data.formats import (
    AlpacaFormat,
    ChatFormat,
    Format,
    FormatOptions,
    PromptFormat,
    TextFormat,
    TokensFormat,
)
from agilerl.data.preference import PreferenceFormat
from agilerl.data.records import Row
from agilerl.errors import DataError

__all__ = ["FORMATS", "check_columns", "detect", "members"]

FORMATS = ("prompt_response", "prompt_completion", "alpaca", "sharegpt", "messages", "text", "tokens", "preference")

_CHATS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("input", "output"),
    ("source", "target"),
    ("prompt", "answer"),
    ("prompt", "output"),
    ("prompt", "chosen"),
    ("question", "chosen"),
)
_OUTPUTS = ("output", "response", "completion", "answer", "chosen")


def detect(
    rows: Sequence[Row],
    available: Sequence[str],
    *,
    objective: str,
    options: FormatOptions,
    name: str = "auto",
    columns: Mapping[str, str] | None = None,
    split: str = "train",
) -> Format | PreferenceFormat:
    """The format of a split.

    Args:
        rows: Its first few rows.
        available: Its columns.
        objective: ``sft`` or ``preference``.
        options: Passed to the format.
        name: One of :data:`FORMATS`, or ``auto``.
        columns: Which column plays which part, as far as the user says; a dotted path leads into objects and lists.
        split: Named in errors.

    Raises:
        DataError: Unknown name, a column that does not exist, or nothing fits.
    """
    given = {part: column for part, column in (columns or {}).items() if column}
    check_columns(available, given.values(), split, rows)
    if name not in ("auto", *FORMATS):
        raise DataError(f"The data format is {name!r}; it must be 'auto' or one of {', '.join(FORMATS)}.")
    if objective == "preference" or name == "preference":
        return _preference(rows, available, given, options, split)
    if name == "auto":
        name = _guess(rows, available, given, split)
    return _make(name, rows, available, given, options, split)


def _guess(rows: Sequence[Row], available: Sequence[str], given: dict[str, str], split: str) -> str:
    if "prompt" in given or "response" in given:
        return "prompt_response"
    if "messages" in given or _chat_column(rows, available):
        column = given.get("messages") or _chat_column(rows, available)
        first = next((row[column] for row in rows if column and looks_like_turns(row.get(column))), [{}])
        return "sharegpt" if "from" in first[0] else "messages"
    if "instruction" in given or _alpaca_columns(rows, available):
        return "alpaca"
    if pair := _pair(available):
        return "prompt_completion" if pair[1] == "completion" else "prompt_response"
    if "input_ids" in available:
        return "tokens"
    if "text" in given or "text" in available or list(available) == ["content"]:
        return "text"
    raise DataError(
        f"{split} split: its columns ({_names(available)}) fit no known format; name the prompt_column and response_column, "
        f"or a format ({', '.join(FORMATS)})."
    )


def _make(
    name: str,
    rows: Sequence[Row],
    available: Sequence[str],
    given: dict[str, str],
    options: FormatOptions,
    split: str,
) -> Format:
    if name in ("prompt_response", "prompt_completion"):
        pair = _pair(available, given)
        if pair is None:
            missing = "response_column" if "prompt" in given else "prompt_column and response_column"
            raise DataError(f"{split} split: name the {missing}; its columns are {_names(available)}.")
        return PromptFormat(options, given | {"prompt": pair[0], "response": pair[1]}, name)
    if name in ("messages", "sharegpt"):
        column = given.get("messages") or _chat_column(rows, available)
        if column is None:
            raise DataError(f"{split} split: no column holds a list of messages; its columns are {_names(available)}.")
        return ChatFormat(options, given | {"messages": column}, name)
    if name == "alpaca":
        found = _alpaca_columns(rows, available, given)
        if found is None:
            raise DataError(
                f"{split} split: alpaca rows need instruction and output; its columns are {_names(available)}."
            )
        return AlpacaFormat(options, found)
    if name == "tokens":
        column = given.get("ids", "input_ids")
        check_columns(available, [column], split)
        return TokensFormat(options, given | {"ids": column})
    column = given.get("text") or ("text" if "text" in available else "content")
    check_columns(available, [column], split)
    return TextFormat(options, {"text": column})


def _preference(
    rows: Sequence[Row], available: Sequence[str], given: dict[str, str], options: FormatOptions, split: str
) -> PreferenceFormat:
    found = {"chosen": "chosen", "rejected": "rejected"} | given
    check_columns(available, [found["chosen"], found["rejected"]], split)
    if "prompt" not in found:
        prompt = next((name for name in ("prompt", "question", "query") if name in available), None)
        if prompt:
            found["prompt"] = prompt
        elif "instruction" in available:
            found["instruction"] = "instruction"
        elif column := _chat_column(rows, available):
            found["messages"] = column
    return PreferenceFormat(options, found)


def _pair(available: Sequence[str], given: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    given = given or {}
    prompt, response = given.get("prompt"), given.get("response")
    if prompt and response:
        return prompt, response
    for one, other in _PAIRS:
        if (prompt or one) in ([prompt] if prompt else available) and (response or other) in (
            [response] if response else available
        ):
            if not prompt and not response:
                return one, other
            if prompt and other in available and other != prompt:
                return prompt, other
            if response and one in available and one != response:
                return one, response
    return None


def _chat_column(rows: Sequence[Row], available: Sequence[str]) -> str | None:
    for name in _CHATS:
        if name in available and any(looks_like_turns(row.get(name)) or _is_json_turns(row.get(name)) for row in rows):
            return name
    return None


def _is_json_turns(value: object) -> bool:
    return isinstance(value, str) and value.lstrip()[:2] in ("[{", "[ ") and '"role"' in value


def _alpaca_columns(
    rows: Sequence[Row], available: Sequence[str], given: Mapping[str, str] | None = None
) -> dict[str, str] | None:
    given = given or {}
    if "instruction" not in available and "instruction" not in given:
        return None
    found = {"instruction": "instruction"}
    output = next((name for name in _OUTPUTS if name in available), None)
    nested = next(
        (name for name in available for row in rows[:1] if _is_instances(row.get(name))),
        None,
    )
    if output:
        found["output"] = output
    elif nested:
        found |= {"input": f"{nested}.input", "output": f"{nested}.output"}
    for name in ("input", "system", "history"):
        if name in available:
            found.setdefault(name, name)
    found |= given
    return found if "output" in found else None


def _is_instances(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "output" in value[0]


def check_columns(available: Sequence[str], needed: Iterable[str], split: str, rows: Sequence[Row] = ()) -> None:
    """Whether the columns exist; of a dotted path, whether it leads anywhere in ``rows``.

    Raises:
        DataError: One does not; lists those there are and the nearest.
    """
    for column in needed:
        if column in available:
            continue
        first, _, rest = column.partition(".")
        if rest and first in available:
            _check_members(first, rest, split, rows)
            continue
        near = get_close_matches(column, available, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{split} split: column {column!r} is missing; its columns are {_names(available)}.{hint}")


def _check_members(column: str, rest: str, split: str, rows: Sequence[Row]) -> None:
    """Whether the first step of a path into ``column`` exists in any of the rows."""
    names = members(rows, column)
    member = rest.partition(".")[0]
    if not names or member in names or rest in names:
        return
    near = get_close_matches(member, names, 1)
    hint = f" Did you mean {column}.{near[0]!s}?" if near else ""
    raise DataError(f"{split} split: {column!r} holds no {member!r}; it holds {_names(names)}.{hint}")


def members(rows: Sequence[Row], column: str) -> list[str]:
    """Keys of the objects in a column, or in the lists in it."""
    values = (
        value for row in rows for value in (row[column] if isinstance(row.get(column), list) else [row.get(column)])
    )
    return list(dict.fromkeys(str(key) for value in values if isinstance(value, dict) for key in value))


def _names(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"
