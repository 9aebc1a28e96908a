"""One split of an environment: rows in whatever form, to a prepared split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from agilerl.data.chat import ChatRenderer, ChatSettings
from agilerl.data.conversation import looks_like_turns
from agilerl.data.detect import check_columns, detect
from agilerl.data.encoder import TextEncoder
from agilerl.data.fit import LengthPolicy
from agilerl.data.formats import Format, FormatOptions, PromptFormat
from agilerl.data.preference import PreferenceFormat
from agilerl.data.prepare import BadRows, nothing_left, prepare, prepare_preference
from agilerl.data.records import Row
from agilerl.data.report import Report
from agilerl.data.template import Template
from agilerl.data.templates import find_template
from agilerl.data.tokenize import RowTokenizer
from agilerl.errors import DataError
from agilerl.llm_envs.splits import PreferenceSplit, SFTSplit, Split

__all__ = ["SplitBuilder", "SplitSettings"]

OBJECTIVES = ("sft", "preference")
_PEEK = 64


@dataclass(frozen=True)
class SplitSettings:
    """Everything besides rows and tokenizer that decides a split; see :class:`~agilerl.llm_envs.DatasetEnv`."""

    objective: str
    response_column: str = "response"
    policy: LengthPolicy = field(default_factory=LengthPolicy)
    data_format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    options: FormatOptions = field(default_factory=FormatOptions)
    bad_rows: BadRows = "raise"
    control_tokens: str = "text"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatSettings = field(default_factory=ChatSettings)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise DataError(f"objective is {self.objective!r}; it must be one of {', '.join(map(repr, OBJECTIVES))}.")


class SplitBuilder:
    """Prepares splits under one set of settings."""

    def __init__(self, tokenizer: Any, settings: SplitSettings) -> None:
        self.settings = settings
        self.encoder = TextEncoder(tokenizer, settings.control_tokens)
        source = find_template(settings.chat_template) if settings.chat_template else None
        has_template = source is not None or bool(getattr(tokenizer, "chat_template", None))
        template = Template(tokenizer, source, settings.chat_template_kwargs) if has_template else None
        self.renderer = ChatRenderer(self.encoder, template, settings.chat)
        self.tokenise = RowTokenizer(self.encoder, self.renderer)
        self.options = replace(settings.options, has_template=has_template)

    def build(self, dataset: Any, split: str, folder: Path | None = None) -> Split:
        """Prepare one split.

        Raises:
            DataError: It is empty, a column is missing, a row is bad, or nothing is left of it.
        """
        rows, columns, is_columnar = rows_of(dataset, split)
        iterator = iter(rows)
        first = list(islice(iterator, _PEEK))
        report = Report(split)
        if not first:
            raise nothing_left(report)
        format_ = self.format_of(first, columns, split, is_columnar=is_columnar)
        report.format = format_.name
        self._note_unused(format_, columns, report)
        settings = self.settings
        numbered = enumerate(chain(first, iterator))
        common: dict[str, Any] = {"bad_rows": settings.bad_rows, "folder": folder}
        if isinstance(format_, PreferenceFormat):
            prepared = prepare_preference(numbered, format_.convert, self.tokenise, settings.policy, report, **common)
        else:
            prepared = prepare(numbered, format_.convert, self.tokenise, settings.policy, report, **common)
        if not report.examples:
            raise nothing_left(report)
        if len(prepared.stores) == 2:
            return PreferenceSplit(*prepared.stores, report, self.encoder.pad_id)
        return SFTSplit(prepared.stores[0], report, self.encoder.pad_id)

    def format_of(
        self, first: Sequence[Row], columns: Sequence[str], split: str, *, is_columnar: bool
    ) -> Format | PreferenceFormat:
        """The format of a split: the documented columns, or what is detected or named."""
        settings = self.settings
        options = replace(self.options, is_columnar=is_columnar)
        if settings.data_format is not None:
            return detect(
                first,
                columns,
                objective=settings.objective,
                options=options,
                name=settings.data_format,
                columns=settings.columns,
                split=split,
            )
        parts = dict(settings.columns)
        if settings.objective == "sft":
            parts = {"prompt": "prompt", "response": settings.response_column} | parts
            check_columns(columns, parts.values(), split)
            return PromptFormat(options, parts)
        parts = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"} | parts
        if any(looks_like_turns(row.get(parts["chosen"])) for row in first) and parts["prompt"] not in columns:
            del parts["prompt"]
        check_columns(columns, parts.values(), split)
        return PreferenceFormat(options, parts)

    def _note_unused(self, format_: Format | PreferenceFormat, columns: Sequence[str], report: Report) -> None:
        used = {path.split(".", 1)[0] for path in format_.columns.values()} | {"tools", "system"}
        unused = [column for column in columns if column not in used]
        if unused:
            report.notice(f"columns not used: {', '.join(unused)}")


def rows_of(dataset: Any, split: str) -> tuple[Any, list[str], bool]:
    """Rows of a split, its columns, and whether they come from columnar storage.

    Raises:
        DataError: It is nothing that rows can be read from.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, dict):
        raise DataError(f"{split} split: it is a dict of splits ({', '.join(columns)}); pass one of them.")
    if isinstance(dataset, Sequence) and not isinstance(dataset, str | bytes):
        found: dict[str, None] = {}
        for number, row in enumerate(dataset):
            if not isinstance(row, Mapping):
                raise DataError(f"{split} split, row {number}: it is {type(row).__name__}, not a dict.")
            found.update(dict.fromkeys(row))
        return dataset, list(found), False
    if columns is not None and hasattr(dataset, "__iter__"):
        return dataset, list(columns), True
    if dataset is None or isinstance(dataset, str | bytes | Mapping) or not hasattr(dataset, "__iter__"):
        raise DataError(
            f"{split} split: it is {'None' if dataset is None else type(dataset).__name__}; give a datasets.Dataset, an "
            "IterableDataset or a list of dicts."
        )
    iterator: Iterator[Row] = iter(dataset)
    first = list(islice(iterator, _PEEK))
    names = list(dict.fromkeys(name for row in first for name in row))
    return chain(first, iterator), names, hasattr(dataset, "features")
