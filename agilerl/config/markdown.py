"""The reference page of all settings, made from the schema: it cannot say anything else than the code does."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agilerl.config.names import sections_of
from agilerl.config.schema import RunConfig
from agilerl.config.section import Section

__all__ = ["configuration_page"]

_OPENING = """\
# Settings

<!-- Made by scripts/generate-docs from agilerl/config; edit the docstrings there. -->

A run is described by a YAML file, by `section.key=value` on the command line, or both; the command line wins.

```yaml
model:
  name: smollm2-135m
data:
  train: rows.jsonl
sft:
  lr: 2e-5
```

```sh
agilerl sft run.yaml sft.lr=1e-4 lora.rank=8
```

* A name that does not exist is refused with the nearest one that does, and all problems are told at once, before anything
  heavy is loaded.
* `2e-5`, `1.0e-5`, `1_000` are numbers wherever a number belongs; `yes`, `no`, `on`, `off` are switches where one belongs,
  and words elsewhere. A key that stands twice is refused.
* `agilerl sft --show-config ...` shows every setting and where it came from: default, file and line, or command line.
* The effective settings are saved as `run.yaml` beside the checkpoint. `--resume` takes them as a base: what the file or the
  command line says now wins, and each difference is printed as old -> new.
"""


def configuration_page() -> str:
    """Markdown of all sections, settings, defaults and what they mean."""
    parts = [_OPENING]
    nested: dict[str, type[Section]] = {}
    for name, section in sections_of(RunConfig).items():
        parts.append(_section(f"`{name}`", section))
        nested |= {
            cls.__name__: cls for field in section.model_fields.values() for cls in _sections_in(field.annotation)
        }
    for name, section in nested.items():
        parts.append(_section(f"{name.removesuffix('Config')} (inside the settings above)", section))
    return "\n".join(parts)


def _section(title: str, section: type[Section]) -> str:
    rows = [_row(name, field) for name, field in section.model_fields.items()]
    doc = " ".join((section.__doc__ or "").split())
    return "\n".join(
        [f"## {title}\n", f"{doc}\n", "| setting | values | default | what it does |", "|---|---|---|---|", *rows, ""]
    )


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    cells = [f"`{name}`", _values(field), _default(field), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value in ([], {}):
        return ""
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: FieldInfo) -> str:
    bounds = [_bound(rule) for rule in field.metadata]
    text = _type(field.annotation)
    told = [bound for bound in bounds if bound]
    return f"{text}, {' and '.join(told)}" if told else text


def _bound(rule: Any) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " ".join(f"{words} {_plain(getattr(rule, sign))}" for sign, words in signs.items() if hasattr(rule, sign))


def _type(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in inside if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inside)
    if origin is list:
        return f"list of {_type(inside[0])}"
    if origin is dict:
        return f"{_type(inside[0])} -> {_type(inside[1])}"
    names: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "switch", Any: "anything"}
    return names.get(annotation) or annotation.__name__.removesuffix("Config")


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [cls for inner in get_args(annotation) for cls in _sections_in(inner)]
