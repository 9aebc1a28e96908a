"""A described data set to an environment: the entry of the command line, and of Python users who have files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from agilerl.config.data import DataSection, SourceConfig
from agilerl.data.chat import ChatSettings
from agilerl.data.fit import LengthPolicy
from agilerl.data.formats import FormatOptions
from agilerl.data.image_rows import has_images
from agilerl.data.records import RowFault
from agilerl.data.sources import Sources, open_source
from agilerl.errors import DataError
from agilerl.llm_envs.build import SplitSettings
from agilerl.llm_envs.dataset_env import DatasetEnv

__all__ = ["holds_images", "make_env", "open_sources", "split_settings"]


_FIRST_OF_STREAM = 64


def make_env(
    data: DataSection | str,
    tokenizer: Any,
    *,
    objective: str = "sft",
    seed: int = 42,
    rank: int = 0,
    world_size: int = 1,
    max_positions: int | None = None,
    stop_ids: Sequence[int] | None = None,
    is_cached: bool = True,
    is_checked: bool = True,
    processor: Any = None,
    **changes: Any,
) -> DatasetEnv:
    """Open, detect, tokenise, split and check the data that ``data`` describes.

    Args:
        data: The ``data`` section of a run, or just the training rows: a file, folder, glob or Hub name.
        tokenizer: Encodes rows.
        objective: ``sft`` or ``preference``.
        seed: Order of rows, and mix of sources.
        rank: This rank's index.
        world_size: Number of ranks that share each batch.
        max_positions: Most tokens that the model can see; caps ``max_context_length``.
        stop_ids: Tokens at which the model stops, besides the tokenizer's EOS.
        is_checked: Whether data that would waste a run is refused; ``data.allow`` waives single checks.
        is_cached: Whether tokenised splits are kept in the cache folder and found there again.
        processor: The model's processor, for rows with images; see :class:`DatasetEnv`.
        changes: Fields of the section to set, such as ``max_context_length=1024``.

    Raises:
        DataError: (a ``ValueError``) what was found, what is allowed, what to do.
    """
    if isinstance(data, str):
        data = DataSection.model_validate({"train": data} | changes)
    elif changes:
        data = DataSection.model_validate(data.model_dump() | changes)
    if not data.train:
        raise DataError("data.train names no rows; give a file, folder, glob or Hub name.")
    train = open_sources(data.train, "train", seed=seed, limit=data.limit, streaming=data.streaming)
    test = open_sources(data.test, "test", seed=seed, limit=data.limit) if data.test else None
    if data.streaming and test is None:
        raise DataError(
            "data.streaming reads rows once, in passing, so nothing can be held out of them; give data.test."
        )
    env = DatasetEnv.from_settings(
        train,
        test,
        tokenizer,
        split_settings(data, objective, max_positions),
        data_batch_size_per_gpu=data.data_batch_size_per_gpu,
        seed=seed,
        rank=rank,
        world_size=world_size,
        test_share=data.test_share,
        is_cached=is_cached,
        is_streamed=data.streaming,
        processor=processor,
    )
    if is_checked:
        env.check(allow=data.allow, stop_ids=stop_ids)
    return env


def holds_images(data: DataSection) -> bool:
    """Whether any training record has an image; of a stream, any of the first.

    Raises:
        DataError: A source does not exist.
    """
    sources = open_sources(data.train or (), "train", seed=0, limit=data.limit, streaming=data.streaming)
    rows = islice(sources, _FIRST_OF_STREAM) if data.streaming else sources
    return any(not isinstance(row, RowFault) and has_images(row) for _, row in rows)


def split_settings(data: DataSection, objective: str, max_positions: int | None = None) -> SplitSettings:
    """What a ``data`` section says about the way from rows to tokens.

    Raises:
        DataError: The rows may be longer than the model can see.
    """
    limits = [limit for limit in (data.max_context_length, max_positions) if limit is not None]
    if data.max_context_length and max_positions and data.max_context_length > max_positions:
        raise DataError(
            f"data.max_context_length is {data.max_context_length}, but the model has {max_positions} positions; lower it."
        )
    is_plain = data.chat_template == "none"
    columns = {
        "prompt": data.prompt_column,
        "response": data.response_column,
        "messages": data.messages_column,
        "text": data.text_column,
        **data.columns,
    }
    if objective == "preference":
        columns |= {"chosen": data.chosen_column, "rejected": data.rejected_column}
    return SplitSettings(
        objective=objective,
        policy=LengthPolicy(min(limits, default=None), data.min_completion_length, data.too_long),
        data_format=data.format,
        columns={part: column for part, column in columns.items() if column},
        options=FormatOptions(render="plain" if is_plain else data.render, system=data.system, roles=data.roles),
        bad_rows=data.bad_rows,
        control_tokens=data.control_tokens,
        chat_template=None if is_plain else data.chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
        chat=ChatSettings(data.train_on, tuple(data.train_roles)),
    )


def open_sources(
    named: Sequence[SourceConfig], split: str, *, seed: int, limit: int | None = None, streaming: bool = False
) -> Sources:
    """The sources of a split, in sequence or mixed by weight.

    Raises:
        DataError: One does not exist.
    """
    parts = []
    for source in named:
        opened = open_source(source, default_split=split, streaming=streaming)
        weight = source.weight
        if weight is not None and len(opened) > 1:  # a folder's share is the share of its files together
            weight /= len(opened)
        parts += [(rows, label, weight) for rows, label in opened]
    return Sources(parts, seed=seed, limit=limit)
