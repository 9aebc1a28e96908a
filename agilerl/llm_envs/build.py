"""Splits of an environment: rows in whatever form, to prepared splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agilerl.data.cache import cache_key, prepared_in_cache
from agilerl.data.chat import ChatRenderer, ChatSettings
from agilerl.data.conversation import looks_like_turns
from agilerl.data.detect import check_columns, detect, members
from agilerl.data.encoder import TextEncoder
from agilerl.data.fit import LengthPolicy
from agilerl.data.formats import Format, FormatOptions, PromptFormat
from agilerl.data.held_out import split_by_content
from agilerl.data.image_rows import IMAGE_COLUMNS, has_image_parts, has_images
from agilerl.data.images import ImageFormat, ImageProcessor, ImageTokenizer, Pictures
from agilerl.data.preference import PreferenceFormat
from agilerl.data.prepare import BadRows, Prepared, nothing_left, prepare, prepare_preference
from agilerl.data.records import Row, RowFault
from agilerl.data.report import Report
from agilerl.data.sources import Sources, as_source
from agilerl.data.summary import content_hashes
from agilerl.data.template import Template
from agilerl.data.templates import find_template
from agilerl.data.tokenize import RowTokenizer
from agilerl.errors import DataError, UnsupportedError
from agilerl.llm_envs.splits import StoredSplit
from agilerl.llm_envs.stream import Windows

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
    """Prepares splits under one set of settings.

    Args:
        tokenizer: Encodes rows.
        settings: Everything else that decides the tokens.
        may_be_empty: Give a split of no rows, rather than an error, where all rows were left out.
        processor: The model's processor, where rows may have images.
    """

    def __init__(
        self, tokenizer: Any, settings: SplitSettings, *, may_be_empty: bool = False, processor: Any = None
    ) -> None:
        if processor is not None and settings.objective != "sft":
            raise UnsupportedError("Rows with images can be trained with objective='sft' only; leave processor out.")
        self.images = None if processor is None else ImageProcessor(processor, tokenizer)
        self._pictures: Pictures | None = None
        self.settings = settings
        self._may_be_empty = may_be_empty
        source = find_template(settings.chat_template) if settings.chat_template else None
        if source is None and self.images is not None:
            source = self.images.chat_template
        has_template = source is not None or bool(getattr(tokenizer, "chat_template", None))
        self.template = template = Template(tokenizer, source, settings.chat_template_kwargs) if has_template else None
        self.encoder = TextEncoder(
            tokenizer,
            settings.control_tokens,
            markers=template.markers if template else (),
            tags=template.tags if template else (),
        )
        self.renderer = ChatRenderer(self.encoder, self.template, settings.chat)
        self.tokenise = RowTokenizer(self.encoder, self.renderer)
        self._tokenise_rows = self.tokenise if self.images is None else ImageTokenizer(self.tokenise, self.images)
        self.options = replace(settings.options, has_template=has_template)

    def build(self, dataset: Any, split: str, *, is_cached: bool = False) -> StoredSplit:
        """Prepare one split from rows in memory or from :class:`~agilerl.data.sources.Sources`.

        Raises:
            DataError: It is empty, a column is missing, a row is bad, or nothing is left of it.
        """
        prepared = self.prepare(dataset, split, is_cached=is_cached)
        return self.part(prepared, prepared.report)

    def build_held_out(self, dataset: Any, share: float, *, is_cached: bool = False) -> tuple[StoredSplit, StoredSplit]:
        """Prepare the rows once and hold a share of them out, by content.

        Raises:
            DataError: As for :meth:`build`.
        """
        prepared = self.prepare(dataset, "train", is_cached=is_cached)
        store = prepared.stores[0]
        train, test = split_by_content(content_hashes(prepared.stores), store.source_rows, share)
        reports = [self._report_of(prepared, rows, split) for rows, split in ((train, "train"), (test, "test"))]
        return self.part(prepared, reports[0], train), self.part(prepared, reports[1], test)

    def part(self, prepared: Prepared, report: Report, rows: NDArray[np.int64] | None = None) -> StoredSplit:
        """A split of prepared rows, or of some of them."""
        return StoredSplit(prepared.stores, report, self.encoder.pad_id, rows, self._pictures)

    def build_stream(self, dataset: Any, window: int) -> Windows:
        """A train split whose rows are read, tokenised and shuffled ``window`` at a time.

        Raises:
            DataError: Its first rows show that a column is missing.
        """
        if self.images is not None:
            raise UnsupportedError(
                "Rows with images cannot be streamed, because images are read again for each batch; load the rows instead "
                "(data.streaming=false, or a list or datasets.Dataset)."
            )
        source: Sources | None = dataset if isinstance(dataset, Sources) else None

        def open_rows(epoch: int) -> Iterator[tuple[int, Row | RowFault]]:
            if source is None and (set_epoch := getattr(dataset, "set_epoch", None)) is not None:
                set_epoch(epoch)
            return iter(source if source is not None else Sources([(as_source(dataset, "train"), "train", None)]))

        def prepare_window(rows: Iterator[tuple[int, Row | RowFault]]) -> StoredSplit:
            part = SplitBuilder(self.encoder.tokenizer, self.settings, may_be_empty=True)
            part.encoder, part.renderer, part.tokenise = self.encoder, self.renderer, self.tokenise
            prepared = part._prepare(rows, dataset, "train", None, is_columnar=source.is_columnar if source else True)
            return part.part(prepared, prepared.report)

        identity = cache_key("stream", self.encoder, self._plain_settings("train") | {"window": window})
        return Windows(open_rows, prepare_window, window, identity)

    def _report_of(self, prepared: Prepared, rows: NDArray[np.int64], split: str) -> Report:
        return prepared.report.of_part(
            split,
            rows_kept=len(np.unique(prepared.stores[0].source_rows[rows])),
            examples=len(rows),
            tokens=sum(int(store.lengths[rows].sum()) for store in prepared.stores),
            trained_tokens=sum(int(store.targets_per_row[rows].sum()) for store in prepared.stores),
        )

    def prepare(self, dataset: Any, split: str, *, is_cached: bool = False) -> Prepared:
        """Tokenise rows once, or find them in the cache."""
        sources = dataset if isinstance(dataset, Sources) else Sources([(as_source(dataset, split), split, None)])
        identity = sources.identity if is_cached and self.images is None else ""  # images are read again for each batch
        if self.images is not None:
            sources = sources.with_image_paths()
        if not identity:
            return self._prepare_sources(sources, dataset, split, None)
        key = cache_key(identity, self.encoder, self._plain_settings(split))
        return prepared_in_cache(key, lambda folder: self._prepare_sources(sources, dataset, split, folder))

    def _plain_settings(self, split: str) -> dict[str, Any]:
        template = self.template.identity if self.template else None
        return asdict(self.settings) | {"split": split, "template": template, "chat_template": None}

    def _prepare_sources(self, sources: Sources, dataset: Any, split: str, folder: Path | None) -> Prepared:
        report = Report(split, ", ".join(dict.fromkeys(label for _, label, _ in sources.parts)))
        report.describe = sources.describe
        return self._prepare(iter(sources), dataset, split, folder, is_columnar=sources.is_columnar, report=report)

    def _prepare(
        self,
        numbered: Iterator[tuple[int, Row | RowFault]],
        dataset: Any,
        split: str,
        folder: Path | None,
        *,
        is_columnar: bool,
        report: Report | None = None,
    ) -> Prepared:
        report = report or Report(split)
        first = list(islice(numbered, _PEEK))
        if not first:
            raise nothing_left(report)
        rows = [row for _, row in first if not isinstance(row, RowFault)]
        columns = _columns_of(dataset, rows)
        self._check_images(rows, split)
        if not rows:
            raise DataError(
                f"{split} split: none of its first {len(first)} rows can be read; {report.describe(first[0][0])} {first[0][1]}."
            )
        format_ = self.format_of(rows, columns, split, is_columnar=is_columnar)
        report.format = format_.name
        self._note_unused(format_, columns, rows, report)
        settings = self.settings
        every = chain(first, numbered)
        common: dict[str, Any] = {"bad_rows": settings.bad_rows, "folder": folder}
        if isinstance(format_, PreferenceFormat):
            prepared = prepare_preference(every, format_.convert, self.tokenise, settings.policy, report, **common)
        elif self.images is not None:
            with_images = ImageFormat(format_)
            row_of, every = _rereadable(dataset, every)
            self._pictures = Pictures(row_of, with_images, self.images)
            prepared = prepare(every, with_images.convert, self._tokenise_rows, settings.policy, report, **common)
            report.notice(f"{with_images.num_pictured:,} of {report.rows_in:,} rows have images")
        else:
            prepared = prepare(every, format_.convert, self.tokenise, settings.policy, report, **common)
        for notice in self.renderer.notices:
            report.notice(notice)
        if not report.examples and not self._may_be_empty:
            raise nothing_left(report)
        return prepared

    def _check_images(self, rows: Sequence[Row], split: str) -> None:
        """Images that nothing would read must not be left out in silence."""
        if self.settings.objective == "preference" and any(map(has_images, rows)):
            raise UnsupportedError(
                f"{split} split: it holds images, and pairs with images cannot be trained; train prompts and answers with "
                "them (objective='sft'), or leave the images out."
            )
        if self.images is None and any(map(has_image_parts, rows)):
            raise DataError(
                f"{split} split: its messages hold images, which only the processor of a vision-language model can turn into "
                "tokens; train such a model, and from Python give DatasetEnv(..., processor=...)."
            )

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
            check_columns(columns, parts.values(), split, first)
            return PromptFormat(options, parts)
        parts = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"} | parts
        if any(looks_like_turns(row.get(parts["chosen"])) for row in first) and parts["prompt"] not in columns:
            del parts["prompt"]
        check_columns(columns, parts.values(), split, first)
        return PreferenceFormat(options, parts)

    def _note_unused(
        self, format_: Format | PreferenceFormat, columns: Iterable[str], rows: Sequence[Row], report: Report
    ) -> None:
        used = set(IMAGE_COLUMNS) if self.images is not None else set()
        used |= {path.split(".", 1)[0] for path in format_.columns.values()} | {"tools", "system"}
        if format_.name == "tokens":
            used |= {"labels", "weights"}
        unused = [column for column in columns if column not in used]
        paths = [path for path in format_.columns.values() if "." in path]
        for column in dict.fromkeys(path.split(".", 1)[0] for path in paths):
            inner = (f"{column}.{name}" for name in members(rows, column))
            unused += [name for name in inner if not any(f"{path}.".startswith(f"{name}.") for path in paths)]
        if unused:
            report.notice(f"columns not used: {', '.join(unused)}")


def _rereadable(
    dataset: Any, numbered: Iterable[tuple[int, Row | RowFault]]
) -> tuple[Callable[[int], Row], Iterable[tuple[int, Row | RowFault]]]:
    """How to get a record again by its number: from where it is held, else it is kept."""
    if isinstance(dataset, Sequence) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return dataset.__getitem__, numbered
    kept: dict[int, Row] = {}

    def remember() -> Iterator[tuple[int, Row | RowFault]]:
        for number, row in numbered:
            if not isinstance(row, RowFault):
                kept[number] = row
            yield number, row

    return kept.__getitem__, remember()


def _columns_of(dataset: Any, first: Sequence[Row]) -> list[str]:
    """Columns of a split: those it declares, else those of all rows of a list, else those of the first rows."""
    declared = getattr(dataset, "column_names", None)
    if declared is not None:
        return list(declared)
    rows: Iterator[Row] = iter(dataset if isinstance(dataset, Sequence) else first)
    return list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
