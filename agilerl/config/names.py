"""What a person may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import get_args

from pydantic import BaseModel

from agilerl.config.section import Section

__all__ = ["fields_of", "sections_of", "suggest"]


def sections_of(root: type[BaseModel]) -> dict[str, type[Section]]:
    """Name -> class of each section of a run description."""
    return {
        name: field.annotation
        for name, field in root.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def fields_of(section: type[Section]) -> Mapping[str, str]:
    """Every name that points at a field: its own, and names known from elsewhere -> the field."""
    return {**section.other_names, **{name: name for name in section.model_fields}}


def suggest(root: type[Section], path: list[str], prefer: str = "sft") -> str:
    """End of the sentence about an unknown key: the place it belongs to, or the nearest name.

    Args:
        root: Class of the whole description.
        path: Keys down to the unknown one.
        prefer: Section named first when several have such a field.
    """
    *parents, key = path
    wanted = key.lower().replace("-", "_")
    inside = _section_at(root, parents)
    if inside is not None and inside is not root:
        here = fields_of(inside)
        if wanted in here:
            return f"did you mean {_join(parents, here[wanted])}?"
    elsewhere = [
        (section, fields_of(cls)[wanted]) for section, cls in _ordered(root, prefer) if wanted in fields_of(cls)
    ]
    if elsewhere:
        section, name = elsewhere[0]
        verb = "did you mean" if parents == [section] else "it belongs in"
        return f"{verb} {section}.{name}?" if verb == "did you mean" else f"{verb} section {section}: {section}.{name}"
    return _nearest(root, inside, parents, wanted, prefer)


def _nearest(root: type[Section], inside: type[Section] | None, parents: list[str], wanted: str, prefer: str) -> str:
    local = dict(fields_of(inside)) if inside is not None else {}
    near = difflib.get_close_matches(wanted, local, n=1, cutoff=0.6)
    if near:
        return f"did you mean {_join(parents, local[near[0]])}?"
    everywhere = {
        name: f"{section}.{field}"
        for section, cls in reversed(list(_ordered(root, prefer)))
        for name, field in fields_of(cls).items()
    }
    near = difflib.get_close_matches(wanted, everywhere, n=1, cutoff=0.75)
    if near:
        return f"did you mean {everywhere[near[0]]}?"
    known = ", ".join(inside.model_fields if inside is not None else root.model_fields)
    return f"known here: {known}"


def _ordered(root: type[Section], prefer: str) -> Iterator[tuple[str, type[Section]]]:
    sections = sections_of(root)
    if prefer in sections:
        yield prefer, sections[prefer]
    yield from ((name, cls) for name, cls in sections.items() if name != prefer)


def _section_at(root: type[Section], parents: list[str]) -> type[Section] | None:
    """The class that describes the mapping at ``parents``; ``None`` where it is free-form."""
    current: type[Section] | None = root
    for key in parents:
        if current is None:
            return None
        field = current.model_fields.get(key)
        if field is None:  # a list index or the name of a range: the class is that of its container
            continue
        current = _first_section(field.annotation)
    return current


def _first_section(annotation: object) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in get_args(annotation):
        found = _first_section(inner)
        if found is not None:
            return found
    return None


def _join(parents: list[str], name: str) -> str:
    return ".".join([*parents, name])
