"""One split of an environment: rows in whatever form, to a prepared split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from agilerl.data.chat import ChatRenderer, ChatSettings
from agilerl.data.encoder import TextEncoder
from agilerl.data.fields import is_messages, messages_of, text_of
from agilerl.data.fit import LengthPolicy
from agilerl.data.prepare import BadRows, Convert, numbered, prepare_sft
from agilerl.data.records import Pair, Record, Reply, Row
from agilerl.data.report import Report
from agilerl.data.template import Template
from agilerl.data.tokenize import RowTokenizer
from agilerl.errors import DataError
from agilerl.llm_envs.splits import SFTSplit, Split

__all__ = ["SplitBuilder"]

OBJECTIVES = ("sft", "preference")


class SplitBuilder:
    """Prepares splits under one set of settings; see :class:`~agilerl.llm_envs.DatasetEnv` for what they mean."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        objective: str,
        response_column: str,
        policy: LengthPolicy,
        data_format: str | None,
        columns: dict[str, str],
        bad_rows: str,
        control_tokens: str,
        chat_template: str | None,
        chat_template_kwargs: dict[str, Any],
        chat_settings: ChatSettings,
    ) -> None:
        if objective not in OBJECTIVES:
            raise DataError(f"objective is {objective!r}; it must be one of {', '.join(map(repr, OBJECTIVES))}.")
        if bad_rows not in ("raise", "skip"):
            raise DataError(f"bad_rows is {bad_rows!r}; it must be 'raise' or 'skip'.")
        self.encoder = TextEncoder(tokenizer, control_tokens)
        has_template = chat_template is not None or getattr(tokenizer, "chat_template", None)
        template = Template(tokenizer, chat_template, chat_template_kwargs) if has_template else None
        self.tokenise = RowTokenizer(self.encoder, ChatRenderer(self.encoder, template, chat_settings))
        self.objective, self.policy = objective, policy
        self.bad_rows: BadRows = "skip" if bad_rows == "skip" else "raise"
        self.response_column = response_column

    def build(self, dataset: Any, split: str) -> Split:
        """Prepare one split.

        Raises:
            DataError: It is empty, a column is missing, a row is bad, or nothing is left of it.
        """
        rows, columns = _rows_of(dataset, split)
        _check_columns(columns, ["prompt", self.response_column], split)
        report = Report(split, "prompt_response")
        prepared = prepare_sft(
            numbered(rows), self._converter(), self.tokenise, self.policy, report, bad_rows=self.bad_rows
        )
        if not report.rows_in:
            raise DataError(f"{split} split: it is empty; give it at least one row.")
        if not report.rows_kept:
            raise nothing_left(report)
        return SFTSplit(prepared.store, report, self.encoder.pad_id)

    def _converter(self) -> Convert:
        column = self.response_column

        def convert(row: Row) -> Record:
            prompt = row.get("prompt")
            if is_messages(prompt):
                return Reply(messages_of(prompt, "prompt"), text_of(row, column), row.get("tools"))
            return Pair(text_of(row, "prompt"), text_of(row, column))

        return convert


def nothing_left(report: Report) -> DataError:
    """The sentence for a split of which no row could be used."""
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(report.dropped.items()))
    return DataError(
        f"{report.split} split: none of its {report.rows_in} rows is left ({reasons}); raise max_context_length, lower "
        "min_completion_length, or mend the rows."
    )


def _rows_of(dataset: Any, split: str) -> tuple[Any, list[str] | None]:
    """Rows of a split and its columns, where they can be known."""
    if dataset is None:
        raise DataError(f"{split} split: it is None; give a datasets.Dataset, an IterableDataset or a list of dicts.")
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, dict):
        raise DataError(f"{split} split: it is a DatasetDict with {', '.join(columns)}; pass one of them.")
    if isinstance(dataset, Sequence) and not isinstance(dataset, str):
        for number, row in enumerate(dataset):
            if not isinstance(row, dict):
                raise DataError(f"{split} split, row {number}: it is {type(row).__name__}, not a dict.")
        found: dict[str, None] = {}
        for row in dataset:
            found.update(dict.fromkeys(row))
        return dataset, list(found) if dataset else None
    if columns is not None:
        return dataset, list(columns) if _has_rows(dataset) else None
    if not hasattr(dataset, "__iter__") or isinstance(dataset, (str, bytes)):
        raise DataError(
            f"{split} split: it is {type(dataset).__name__}; give a datasets.Dataset, an IterableDataset or a list of dicts."
        )
    iterator = iter(dataset)
    first = list(islice(iterator, 1))
    return _chain(first, iterator), list(first[0]) if first else None


def _has_rows(dataset: Any) -> bool:
    return not hasattr(dataset, "__len__") or len(dataset) > 0


def _chain(first: list[Row], rest: Iterator[Row]) -> Iterator[Row]:
    yield from first
    yield from rest


def _check_columns(columns: list[str] | None, needed: list[str], split: str) -> None:
    if columns is None:
        return
    missing = [column for column in needed if column not in columns]
    if missing:
        raise DataError(
            f"{split} split: column {' and '.join(map(repr, missing))} is missing; its columns are "
            f"{', '.join(map(repr, columns))}."
        )
