"""Where a record keeps its images, before anything reads them: which records have some, and where relative paths begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agilerl.data.records import Row

__all__ = ["IMAGE_COLUMNS", "IMAGE_PARTS", "REFERENCES", "has_image_parts", "has_images", "with_image_paths"]

IMAGE_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url")
"""Types of message parts that stand for an image."""
REFERENCES = ("image", "path", "bytes", "url", "image_url")
"""Keys of such a part that may hold the image itself."""


def has_image_parts(row: Row) -> bool:
    """Whether any message of a record has an image part."""
    return next(_parts(row), None) is not None


def has_images(row: Row) -> bool:
    """Whether a record has an image, in a column or in a part of a message."""
    held = (row.get(name) for name in IMAGE_COLUMNS)
    return any(value is not None and value != [] for value in held) or has_image_parts(row)


def with_image_paths(row: Row, folder: Path) -> Row:
    """The record with relative image paths taken from ``folder``; the record itself stays as it is.

    A path that is not there is left alone: it may be meant from the working directory.
    """
    if not has_images(row):
        return row
    located = {name: _located(row[name], folder) for name in IMAGE_COLUMNS if row.get(name) is not None}
    for name, value in row.items():
        if name not in located and isinstance(value, list):
            located[name] = [_located_turn(turn, folder) for turn in value]
    return {**row, **located}


def _located_turn(turn: Any, folder: Path) -> Any:
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return turn
    return {**turn, "content": [_located_part(part, folder) if _is_image(part) else part for part in content]}


def _located_part(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {name: _located(value, folder) if name in REFERENCES else value for name, value in part.items()}


def _located(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_located(one, folder) for one in value]
    if isinstance(value, dict):
        return {name: _located(one, folder) if name in ("path", "url") else one for name, one in value.items()}
    if isinstance(value, str) and "://" not in value and not value.startswith("data:"):
        place = folder / Path(value).expanduser()
        return str(place) if place.is_file() else value
    return value


def _parts(row: Row) -> Iterator[Mapping[str, Any]]:
    for value in row.values():
        for turn in value if isinstance(value, list) else ():
            content = turn.get("content") if isinstance(turn, dict) else None
            yield from (part for part in content if _is_image(part)) if isinstance(content, list) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS
