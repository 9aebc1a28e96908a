"""The ``data`` section: where rows come from and how they become training examples."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from agilerl.config.section import Section
from agilerl.config.yaml import typed

__all__ = ["DataSection", "SourceConfig"]


class SourceConfig(Section):
    """One place that rows come from. A text alone is its `path`."""

    other_names: ClassVar = {"dataset": "path", "config": "name", "subset": "name"}

    path: str = Field(min_length=1)
    """A file (jsonl, json, csv, parquet, arrow), folder, glob, or Hub name."""
    name: str | None = None
    """Configuration of a Hub data set."""
    split: str | None = None
    """Split of a Hub data set; nothing: train (test for `data.test`)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub data set."""
    weight: float | None = Field(default=None, gt=0)
    """Share of this source in a mix, relative to the others; nothing anywhere: one after the other."""


def _as_sources(value: object) -> object:
    """A text, one mapping or a list of them -> a list of mappings."""
    if value is None or isinstance(value, SourceConfig):
        return value if value is None else [value]
    many = value if isinstance(value, (list, tuple)) else [value]
    return [{"path": one} if isinstance(one, str) else one for one in many]


class DataSection(Section):
    """Rows, and what is trained of them."""

    other_names: ClassVar = {
        "dataset": "train",
        "path": "train",
        "eval": "test",
        "validation": "test",
        "max_seq_length": "max_context_length",
        "max_length": "max_context_length",
        "cutoff_len": "max_context_length",
        "batch_size": "data_batch_size_per_gpu",
        "val_size": "test_share",
        "input_column": "prompt_column",
        "output_column": "response_column",
    }

    train: list[SourceConfig] | None = None
    """Training rows: a file, a Hub name, or a list of sources; nothing: the bundled demonstration set."""
    test: list[SourceConfig] | None = None
    """Held-out rows; nothing: split off from the training rows by `test_share`."""
    test_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of rows held out when `test` is not given; chosen by content, so duplicates stay on one side."""
    format: str = "auto"
    """Layout of the rows: `auto` or one of prompt_response, alpaca, sharegpt, messages, text, preference."""
    prompt_column: str | None = None
    """Column with the prompt (text or a list of messages); nothing: found by name."""
    response_column: str | None = None
    """Column with the answer; nothing: found by name."""
    messages_column: str | None = None
    """Column with the turns of whole chats; nothing: found by name."""
    text_column: str | None = None
    """Column with plain text; nothing: found by name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column plays which other part (instruction, input, output, system, tools ...); a dotted path leads into lists."""
    chosen_column: str = "chosen"
    """Preference data: column with the better answer."""
    rejected_column: str = "rejected"
    """Preference data: column with the worse answer."""
    render: Literal["auto", "chat", "plain"] = "auto"
    """Whether plain prompts become chats: `auto` does so for instructions (alpaca), not for prompt and response texts."""
    roles: dict[str, str] = Field(default_factory=dict)
    """Further names of speakers and who they are, such as `{narrator: assistant}`."""
    system: str | None = None
    """System message put before every conversation that has none."""
    chat_template: str | None = None
    """`none` (plain text), a named one (chatml, llama-3, gemma, mistral, zephyr), a file; nothing: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments for the chat template, such as `enable_thinking: false`."""
    train_on: Literal["all", "last", "marked"] = "all"
    """Which assistant turns are trained: all, the last one, or those marked `train: true`."""
    train_roles: list[str] = Field(default_factory=lambda: ["assistant"])
    """Whose turns of whole chats are trained."""
    control_tokens: Literal["text", "parse"] = "text"
    """Control tokens in a row's own text: ordinary characters, or control (rows rendered beforehand)."""
    bad_rows: Literal["raise", "skip"] = "raise"
    """Rows that cannot be used: stop and say which, or leave them out and count them."""
    max_context_length: int | None = Field(default=None, ge=2)
    """Longest row in tokens; nothing: the model's own limit."""
    min_completion_length: int | None = Field(default=None, ge=1)
    """Least room, in tokens, that a prompt must leave for its answer."""
    too_long: Literal["cut_response", "drop", "cut_prompt", "split"] = "cut_response"
    """What happens to rows that are too long."""
    data_batch_size_per_gpu: int = Field(default=8, ge=1)
    """Rows per data batch and process; gathered up to the algorithm's batch_size."""
    streaming: bool = False
    """Read while training instead of before; needs `training.max_steps`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows, for a trial."""
    allow: list[str] = Field(default_factory=list)
    """Checks before the first step that may fail, by name (such as `overlap`)."""

    @field_validator("train", "test", mode="before")
    @classmethod
    def _sources(cls, value: object) -> object:
        return _as_sources(value)

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _free_form(cls, value: object) -> object:
        return typed(value)
