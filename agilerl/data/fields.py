"""Reading one field of a row: what is there, or a sentence about what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from agilerl.data.records import Row, RowFault

__all__ = ["as_text", "damage_in", "explode", "short", "text_of"]

_MISSING = object()
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_DAMAGE = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ufffd]")


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
    if isinstance(value, str):
        if not may_be_empty and not value.strip():
            raise RowFault("empty_field", f"has an empty '{column}'" if not value else f"has only blanks in '{column}'")
        if not value.isascii() and _HALF_PAIR.search(value):
            raise RowFault("not_text", f"has half of a surrogate pair in '{column}', which is not a character")
        return value
    if value is None:
        raise RowFault("null_field", f"has a null '{column}'")
    raise RowFault("not_text", f"has {short(value)} ({type(value).__name__}) in '{column}', which is not text")


def damage_in(texts: Iterable[str]) -> tuple[str, ...]:
    """The note ``damaged_text`` where a text holds characters that only a wrong decoding or a binary leaves."""
    return ("damaged_text",) if any(map(_DAMAGE.search, texts)) else ()


def explode(row: Row, paths: dict[str, str]) -> Iterator[Row]:
    """Rows that hold, under each part's name, what its dotted path leads to; a list on the way gives one row per item.

    ``{"output": "instances.output"}`` on a row with three instances gives three rows.
    """
    lists = {path.split(".", 1)[0] for path in paths.values() if "." in path and path not in row}
    many = next((name for name in lists if isinstance(row.get(name), list)), None)
    if many and not row[many]:
        raise RowFault("empty_field", f"has an empty list '{many}'")
    for item in row[many] if many else [None]:
        scope = row if many is None else {**row, many: item}
        yield {part: value for part, path in paths.items() if (value := _follow(scope, path)) is not _MISSING}


def _follow(row: Any, path: str) -> Any:
    if isinstance(row, dict) and path in row:
        return row[path]
    first, _, rest = path.partition(".")
    if not rest or not isinstance(row, dict) or first not in row:
        return _MISSING
    return _follow(row[first], rest)


def short(value: Any) -> str:
    """``repr(value)``, cut to fit a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
