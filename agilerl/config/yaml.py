"""Strict YAML: one meaning per text, line numbers kept, nothing guessed.

Scalars stay text until the schema says what type a setting has. So ``2e-5`` is a number where a number is expected
(YAML 1.1 reads it as text), ``no`` is ``false`` for a switch and the word "no" for a name, and ``1_000`` is a thousand.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

__all__ = ["Document", "Plain", "dump", "parse", "typed"]

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class Plain(str):
    """A scalar that stood without quotes, so that it may become a number or a switch."""


@dataclass
class Document:
    """A parsed text: values, the line of each key by its dotted path, and what is wrong with it."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse(text: str) -> Document:
    """Read YAML without judging its contents; syntax errors and duplicate keys become problems."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        document.problems.append(f"{line}this is not valid YAML ({error.problem})")
        return document
    except yaml.YAMLError as error:
        document.problems.append(f"this is not valid YAML ({' '.join(str(error).split())})")
        return document
    if node is not None:
        document.value = _value(node, "", document, ())
    return document


def _value(node: yaml.Node, path: str, document: Document, parents: tuple[yaml.Node, ...]) -> Any:
    if node in parents:
        document.problems.append(f"line {node.start_mark.line + 1}: an alias that contains itself")
        return None
    inside = (*parents, node)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, f"{path}.{i}", document, inside) for i, one in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None:
            document.problems.append(f"line {line}: a key must be a single word")
            continue
        key_path = f"{path}.{key}" if path else key
        if key in mapping:
            first = document.lines[key_path]
            document.problems.append(f"line {line}: {key_path} stands twice (first in line {first}); keep one")
            continue
        document.lines[key_path] = line
        mapping[key] = _value(value_node, key_path, document, inside)
    return mapping


def _scalar(node: yaml.ScalarNode) -> str | None:
    if node.style is not None:
        return str(node.value)
    return None if node.value in _NULLS else Plain(node.value)


def typed(value: Any) -> Any:
    """Give unquoted scalars the type they look like (YAML 1.2), where the schema has no opinion."""
    if isinstance(value, dict):
        return {str(key): typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    if not isinstance(value, Plain):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _INTEGER.fullmatch(value):
        return int(value)
    if _NUMBER.fullmatch(value):
        return float(value.replace("_", ""))
    return str(value)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would otherwise come back as a number, a switch or nothing."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    changes = value in _NULLS or not isinstance(typed(Plain(value)), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if changes else None)


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be written to a run description; settings are finite.")
    text = repr(value)  # 1e-05 needs its point, or PyYAML adds a tag to keep YAML 1.1 readers from seeing text
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _number)


def dump(value: dict[str, Any]) -> str:
    """YAML that :func:`parse` reads back to the same settings."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
