"""A YAML file and command-line overrides -> one checked :class:`RunConfig`, or all problems at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agilerl.config.names import suggest
from agilerl.config.schema import RunConfig
from agilerl.config.yaml import Document, dump, parse
from agilerl.errors import ConfigError

__all__ = ["LoadedConfig", "load_config"]

_COMMAND_LINE = "command line"

_RIVALS = (("training.epochs", "training.max_steps"), ("evolution.generations", "evolution.evo_steps"))
"""Two ways to say one thing; the later place wins."""


@dataclass(frozen=True)
class LoadedConfig:
    """A checked description and where each setting came from."""

    config: RunConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    """``section.key`` -> ``run.yaml:7``, ``command line`` or ``checkpoint``; what is not listed has its default."""

    def source(self, path: str) -> str:
        """Where the setting ``section.key`` came from."""
        return self.sources.get(path, "default")

    def rows(self, *, only_given: bool = False) -> list[tuple[str, str, str]]:
        """(setting, value, source) of every setting, or of those that were given."""
        table = []
        for section, settings in self.config.to_dict().items():
            for key, value in settings.items():
                path = f"{section}.{key}"
                if not only_given or path in self.sources:
                    table.append((path, _short(value), self.source(path)))
        return table

    def to_yaml(self) -> str:
        """All settings as a file that :func:`load_config` reads."""
        return dump(self.config.to_dict())


@dataclass
class _Draft:
    """Settings on their way to the schema."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    """Which of base, file, overrides and options a setting came from, counted up."""
    layer: int = 0

    def put(self, path: list[str], value: Any, source: str) -> None:
        """Set one value, making the mappings on the way."""
        target: Any = self.values
        for depth, key in enumerate(path[:-1]):
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}
            target = target[key] if isinstance(target, dict) else None
            if not isinstance(target, dict):
                held = ".".join(path[: depth + 1])
                self.problems.append(f"{source}: {'.'.join(path)} cannot be set, {held} is not a group of settings")
                return
        target[path[-1]] = value
        name = ".".join(path[:2])
        self.sources[name] = source
        self.layers[name] = self.layer
        self._replace_rival(name, value)

    def _replace_rival(self, name: str, value: Any) -> None:
        """``max_steps`` on the command line replaces ``epochs`` of the file: two in one place contradict each other."""
        rival = next((pair[1 - pair.index(name)] for pair in _RIVALS if name in pair), None)
        if rival is None or value is None or self.layers.get(rival, self.layer) == self.layer:
            return
        section, key = rival.split(".")
        self.values[section].pop(key, None)
        self.sources.pop(rival, None)


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
    base_name: str = "checkpoint",
    prefer: str = "sft",
) -> LoadedConfig:
    """Read, override and check a run description.

    Args:
        path: YAML file; ``None``: only defaults and overrides.
        overrides: ``section.key=value`` texts; they win over the file.
        options: Dotted setting -> value of a named command-line option (``--model``); ``None`` values are skipped. They
            win over everything.
        base: Settings that file and overrides win over, such as those of the run that is resumed.
        base_name: What ``base`` is called as a source.
        prefer: Section whose names are suggested first.

    Raises:
        ConfigError: Anything is wrong; the message lists all of it.
    """
    draft = _Draft()
    for section, settings in (base or {}).items():
        for key, value in dict(settings).items():
            draft.put([section, key], value, base_name)
    draft.layer += 1
    name = Path(path).name if path is not None else ""
    document = _read(Path(path), draft) if path is not None else Document()
    _merge(document, name, draft)
    draft.layer += 1
    for text in overrides:
        _override(text, draft, prefer)
    for dotted, value in (options or {}).items():
        if value is not None:
            draft.put(dotted.split("."), value, _COMMAND_LINE)
    config = _check(draft, document, name, prefer)
    if config is None or draft.problems:
        raise ConfigError(_tell(draft.problems, name))
    return LoadedConfig(config, dict(draft.sources))


def _read(path: Path, draft: _Draft) -> Document:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path}; give a YAML run description or section.key=value settings."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a run description: {error}.") from None
    document = parse(text)
    if document.problems:
        draft.problems.extend(document.problems)
    elif document.value is None:
        draft.problems.append("the file is empty; leave it out to use the defaults")
    elif not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        draft.problems.append(f"the file holds {kind}; it must hold sections such as 'sft:' with settings below them")
    return document


def _merge(document: Document, name: str, draft: _Draft) -> None:
    if not isinstance(document.value, dict):
        return
    for section, settings in document.value.items():
        if not isinstance(settings, dict):
            if settings is not None or section not in RunConfig.model_fields:
                draft.values[section] = settings
            continue
        for key, value in settings.items():
            draft.put([section, key], value, f"{name}:{document.lines.get(f'{section}.{key}', 1)}")


def _override(text: str, draft: _Draft, prefer: str) -> None:
    dotted, equals, raw = text.partition("=")
    path = [part.strip() for part in dotted.split(".")]
    if equals and len(path) == 1 and path[0]:
        hint = suggest(RunConfig, path, prefer)
        draft.problems.append(f"command line: '{text}' names no section; {hint}")
        return
    if not equals or not all(path):
        draft.problems.append(f"command line: '{text}' is not a setting; write section.key=value, such as sft.lr=2e-5")
        return
    document = parse(raw)
    if document.problems:
        draft.problems.append(f"command line: the value of {dotted} is not valid YAML; put it in quotes: '{text}'")
        return
    draft.put(path, document.value, _COMMAND_LINE)


def _check(draft: _Draft, document: Document, name: str, prefer: str) -> RunConfig | None:
    try:
        return RunConfig.model_validate(draft.values)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            draft.problems.append(_sentence(dict(problem), draft, document, prefer))
        return None


def _sentence(problem: dict[str, Any], draft: _Draft, document: Document, prefer: str) -> str:
    path = [str(part) for part in problem["loc"]]
    dotted = ".".join(path)
    source = draft.sources.get(".".join(path[:2]), "")
    line = document.lines.get(dotted)
    where = f"line {line}: " if line and source != _COMMAND_LINE else f"{source}: " if source == _COMMAND_LINE else ""
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{where}there is no setting {dotted}; {suggest(RunConfig, path, prefer)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}{dotted} is {_short(problem['input'])}, but must be a group of settings"
    if kind == "string_too_short":
        return f"{where}{dotted} is empty, but must be given"
    if kind == "missing":
        return f"{where}{dotted} must be given"
    if kind == "value_error":
        return f"{where}{dotted}: {problem['ctx']['error']}"
    rule = problem["msg"].replace("Input should be", "must be", 1).split(", unable to")[0]
    rule = rule[:1].lower() + rule[1:]
    return f"{where}{dotted} is {_short(problem['input'])}, but {rule}"


def _tell(problems: list[str], name: str) -> str:
    place = f" in {name}" if name else ""
    if len(problems) == 1:
        end = "" if problems[0].endswith("?") else "."
        return f"One problem{place}: {problems[0]}{end}"
    return f"{len(problems)} problems{place}:\n" + "\n".join(f"  - {problem}" for problem in problems)


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else repr(value)
    text = text if text.strip() == text and text else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
