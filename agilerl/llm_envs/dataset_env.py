"""``DatasetEnv``: a train and a test split, tokenised once, handed out in batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agilerl.data.chat import ChatSettings, TrainOn
from agilerl.data.checks import Finding, check, refuse
from agilerl.data.fit import LengthPolicy, OnLong
from agilerl.data.formats import FormatOptions
from agilerl.data.inspect import RowView, view_row
from agilerl.data.order import share_sizes
from agilerl.data.prepare import BadRows, nothing_left
from agilerl.data.report import Report
from agilerl.data.summary import Summary, content_hashes, summarise
from agilerl.errors import DataError
from agilerl.llm_envs.build import SplitBuilder, SplitSettings
from agilerl.llm_envs.feed import Feed
from agilerl.llm_envs.splits import StoredSplit
from agilerl.llm_envs.stream import StreamFeed, is_stream
from agilerl.typing import Batch

__all__ = ["DatasetEnv"]


class DatasetEnv:
    """A data set as an environment: ``reset`` gives the next batch of the active split.

    Args:
        train_dataset: ``datasets.Dataset``, ``datasets.IterableDataset`` or a list of dicts.
        test_dataset: Held-out rows, in any of the same forms.
        tokenizer: Encodes rows, once; one without a pad token will do.
        objective: ``"sft"`` reads ``prompt`` and ``response_column``; ``"preference"`` reads ``prompt``, ``chosen`` and
            ``rejected``. A prompt may be text, or a list of messages that goes through the tokenizer's chat template.
        response_column: Column of the response.
        chat_template_kwargs: Variables for the chat template, such as ``enable_thinking``.
        data_batch_size_per_gpu: Rows of a batch on each rank.
        max_context_length: Most tokens of a row, prompt and response together; None: no limit.
        min_completion_length: A row is dropped when its prompt leaves fewer tokens than this.
        seed: With the epoch, decides the order of train rows.
        rank: This rank's index.
        world_size: Number of ranks that share each batch.
        data_format: Layout of the rows: None for the columns above, ``"auto"`` to detect it, or a format's name.
        columns: Which column plays which part, such as ``{"prompt": "question"}``; default: parts are named like columns.
        on_long: What happens to rows beyond ``max_context_length``: cut_response, drop, cut_prompt or split.
        bad_rows: ``"raise"``, or ``"skip"`` to leave rows out that cannot be used, and count them.
        control_tokens: ``"text"`` reads control tokens inside a row's own text as ordinary characters; ``"parse"`` as control.
        chat_template: A template's name (chatml, llama-3 ...), a file or Jinja text; None: the tokenizer's own.
        train_on: Which turns of whole chats are trained: all, last or marked.
        train_roles: Whose turns of whole chats are trained.
        test_share: With ``test_dataset=None``: the share of the train rows to hold out, by content, so that duplicates stay on
            one side; 0 for no test split.
        is_cached: Whether rows whose identity is known (files, ``datasets.Dataset``) are tokenised once for all runs.
        processor: The model's processor, for rows with images: a column ``images`` (or ``image``), or image parts of messages,
            as PIL images, paths or bytes. Batches then carry ``inputs``, the further model inputs of each row.
        stream_window: Rows of an ``IterableDataset`` that are read, tokenised and shuffled together. A stream that ends within
            one window is held like any other split; a longer one has no known length, so training needs ``max_steps``.
        options: How formats read rows: rendering of plain prompts, system turn, names of speakers.

    Raises:
        DataError: (a ``ValueError``) naming the split, column or row, and what was found.
    """

    def __init__(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Any,
        *,
        objective: str,
        response_column: str = "response",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        data_batch_size_per_gpu: int = 8,
        max_context_length: int | None = None,
        min_completion_length: int | None = None,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        data_format: str | None = None,
        columns: Mapping[str, str] | None = None,
        on_long: OnLong = "cut_response",
        bad_rows: BadRows = "raise",
        control_tokens: str = "text",
        chat_template: str | None = None,
        train_on: TrainOn = "all",
        train_roles: Sequence[str] = ("assistant",),
        options: FormatOptions | None = None,
        test_share: float | None = None,
        is_cached: bool = False,
        stream_window: int = 10_000,
        processor: Any = None,
    ) -> None:
        settings = SplitSettings(
            objective=objective,
            response_column=response_column,
            policy=LengthPolicy(max_context_length, min_completion_length, on_long),
            data_format=data_format,
            columns=dict(columns or {}),
            options=options or FormatOptions(),
            bad_rows=bad_rows,
            control_tokens=control_tokens,
            chat_template=chat_template,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            chat=ChatSettings(train_on, tuple(train_roles)),
        )
        self._set_up(
            train_dataset,
            test_dataset,
            tokenizer,
            settings,
            data_batch_size_per_gpu=data_batch_size_per_gpu,
            seed=seed,
            rank=rank,
            world_size=world_size,
            test_share=test_share,
            is_cached=is_cached,
            stream_window=stream_window,
            processor=processor,
        )

    @classmethod
    def from_settings(
        cls, train_dataset: Any, test_dataset: Any, tokenizer: Any, settings: SplitSettings, **shared: Any
    ) -> DatasetEnv:
        """An environment whose settings have been gathered already; ``shared`` as for the constructor."""
        env = cls.__new__(cls)
        env._set_up(train_dataset, test_dataset, tokenizer, settings, **shared)
        return env

    def _set_up(
        self,
        train_dataset: Any,
        test_dataset: Any,
        tokenizer: Any,
        settings: SplitSettings,
        *,
        data_batch_size_per_gpu: int = 8,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        test_share: float | None = None,
        is_cached: bool = False,
        stream_window: int = 10_000,
        is_streamed: bool = False,
        processor: Any = None,
    ) -> None:
        _check_ranks(rank, world_size)
        _check_count("data_batch_size_per_gpu", data_batch_size_per_gpu)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise DataError(f"seed is {seed!r}; it must be a whole number.")
        self.name = "DatasetEnv"
        self.settings = settings
        self.objective = settings.objective
        self.tokenizer = tokenizer
        self.response_column = settings.response_column
        self.chat_template_kwargs = dict(settings.chat_template_kwargs)
        self.data_batch_size_per_gpu = data_batch_size_per_gpu
        self.max_context_length = settings.policy.max_length
        self.min_completion_length = settings.policy.min_response
        self.seed, self.rank, self.world_size = seed, rank, world_size
        builder = SplitBuilder(tokenizer, settings, processor=processor)
        self.processor = processor
        self.image_id = builder.images.image_id if builder.images is not None else None
        """Token that stands for a part of an image; None for rows of text."""
        self._encoder = builder.encoder
        self.chat_template: str | None = builder.template.source if builder.template else None
        """Jinja text of the template in use where it is not the tokenizer's own; saved with the result."""
        windows = None
        if is_streamed or is_stream(train_dataset):
            _check_count("stream_window", stream_window)
            windows = builder.build_stream(train_dataset, stream_window)
            self._train, is_whole = windows.get(0, 0)
            windows = None if is_whole else windows
            if not len(self._train) and is_whole:
                raise nothing_left(self._train.report)
            self._test = builder.build(test_dataset, "test", is_cached=is_cached)
        elif test_dataset is None and test_share is not None:
            self._train, self._test = builder.build_held_out(train_dataset, test_share, is_cached=is_cached)
        else:
            self._train = builder.build(train_dataset, "train", is_cached=is_cached)
            self._test = builder.build(test_dataset, "test", is_cached=is_cached)
        ranks: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size}
        self._feed: Feed | StreamFeed = Feed(self._train, **ranks) if windows is None else StreamFeed(windows, **ranks)
        self._test_feed = self._fresh_test_feed()
        self._eval_depth = 0
        for report in (self._train.report, self._test.report):
            _warn(report)

    # Batches ---------------------------------------------------------------------------------------------------------

    def reset(self, reset_dataloaders: bool = False) -> Batch:
        """The next batch of the active split; at the end of a pass the next one begins.

        Args:
            reset_dataloaders: Rewind both splits and zero ``num_epochs`` first.
        """
        if reset_dataloaders:
            self._feed.rewind()
            self._test_feed.rewind()
        if self.evaluation_mode and not len(self._test):
            raise DataError("There are no held-out rows: the environment was made without a test split.")
        feed = self._test_feed if self.evaluation_mode else self._feed
        return feed.take(self.data_batch_size_per_gpu * self.world_size)

    def take(self, rows: int) -> Batch:
        """This rank's share of the next ``rows`` global train rows; never crosses an epoch's end."""
        return self._feed.take(rows)

    def feed(self) -> Feed | StreamFeed:
        """An independent reader of the train split that starts at the present place."""
        return self._feed.copy()

    @property
    def reader(self) -> Feed | StreamFeed:
        """The reader behind :meth:`take`: ``epoch``, ``position`` and ``num_rows`` of the train split."""
        return self._feed

    def test_batches(self, rows_per_batch: int | None = None, limit: int | None = None) -> Iterator[Batch]:
        """This rank's share of the test split from its start, the same at every call.

        Args:
            rows_per_batch: Global rows of a batch; None: ``data_batch_size_per_gpu`` on each rank.
            limit: Most batches; None: the whole split, once.
        """
        rows = self.data_batch_size_per_gpu * self.world_size if rows_per_batch is None else rows_per_batch
        feed, count = self._fresh_test_feed(), 0
        while len(self._test) and feed.epoch == 0 and (limit is None or count < limit):
            yield feed.take(rows)
            count += 1

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Make the test split the active one; may be nested, and ends even when the block raises."""
        self._eval_depth += 1
        try:
            yield
        finally:
            self._eval_depth -= 1

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the train split, as plain data."""
        return self._feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a place in the train split.

        Raises:
            DataError: It belongs to other data or another seed.
        """
        self._feed.load_state_dict(state)

    # Facts -----------------------------------------------------------------------------------------------------------

    @property
    def evaluation_mode(self) -> bool:
        """Whether the test split is the active one."""
        return self._eval_depth > 0

    @property
    def num_epochs(self) -> int:
        """Full passes over the train split."""
        return self._feed.epoch

    @property
    def dataset_size(self) -> dict[str, int]:
        """Rows of this rank in each split, after filtering and sharding; a stream of unknown length has no ``train``."""
        sizes = {"train": self._share_of(self._train), "test": self._share_of(self._test)}
        return {"test": sizes["test"]} if self.is_streaming else sizes

    @property
    def is_streaming(self) -> bool:
        """Whether the train split is a stream of unknown length."""
        return self._feed.num_rows is None

    def __len__(self) -> int:
        """Rows of the active split on this rank.

        Raises:
            TypeError: It is a stream of unknown length.
        """
        if self.is_streaming and not self.evaluation_mode:
            raise TypeError("the train split is a stream of unknown length; give train_llm_dataset max_steps")
        return self._share_of(self._test if self.evaluation_mode else self._train)

    @property
    def reports(self) -> dict[str, Report]:
        """What happened to the rows of each split."""
        return {"train": self._train.report, "test": self._test.report}

    @property
    def report(self) -> Report:
        """What happened to the rows of the train split."""
        return self._train.report

    @property
    def longest(self) -> int:
        """Tokens of the longest row of either split; must not exceed the model's positions."""
        return max(self._train.longest, self._test.longest)

    @property
    def fingerprint(self) -> str:
        """Changes with any token or weight of the train split (of a stream: with its settings)."""
        return str(self._feed.state_dict()["fingerprint"])

    # Looking and checking --------------------------------------------------------------------------------------------

    def summary(self, split: str = "train") -> Summary:
        """A split in numbers: rows, tokens, lengths, stop tokens, duplicates."""
        part = self._split(split)
        return summarise(part.stores, part.numbers, part.report, self._encoder)

    def inspect(self, rows: int = 3, split: str = "train") -> list[RowView]:
        """The first rows of a split, token by token: what is trained, and by which rule.

        ``print(view.text)``, ``view.trained_text``, ``view.pieces``; :func:`agilerl.data.inspect.as_html` makes a page.
        """
        part = self._split(split)
        names = ("",) if len(part.stores) == 1 else ("chosen", "rejected")
        views = []
        numbers = list(range(min(rows, len(part))))
        for number, sides in zip(numbers, part.examples(numbers), strict=True):
            source = int(part.stores[0].source_rows[part.numbers[number]])
            views += [view_row(side, source, self._encoder, name) for side, name in zip(sides, names, strict=True)]
        return views

    def check(self, *, allow: Sequence[str] = (), stop_ids: Sequence[int] | None = None) -> list[Finding]:
        """Refuse data that would waste a run: see :data:`agilerl.data.checks.CHECKS`.

        Args:
            allow: Checks that may fail, by name.
            stop_ids: Tokens at which the model stops, besides the tokenizer's EOS.

        Returns:
            The findings that were allowed.

        Raises:
            DataError: Names every finding that was not.
        """
        stops = {*(stop_ids or ()), *([] if self._encoder.eos_id is None else [self._encoder.eos_id])}
        hashes = [content_hashes(part.stores)[part.numbers] for part in (self._train, self._test)]
        findings = check(
            self.summary(),
            is_text=self.report.format == "text",
            stop_ids=stops,
            control_ids=self._encoder.control_ids,
            train_hashes=hashes[0],
            test_hashes=hashes[1],
        )
        return refuse(findings, allow)

    def _split(self, name: str) -> StoredSplit:
        if name not in ("train", "test"):
            raise DataError(f"There is no split {name!r}; the splits are 'train' and 'test'.")
        return self._train if name == "train" else self._test

    @property
    def tokenizer_with_template(self) -> Any:
        """The tokenizer as a result should carry it: with the chat template in use. The caller's own stays as it was.

        Where rows may have images it is the processor, which has a tokenizer.
        """
        encoder = self.processor if hasattr(self.processor, "save_pretrained") else self.tokenizer
        if self.chat_template is None or self.chat_template == getattr(encoder, "chat_template", None):
            return encoder
        carrying = copy.copy(encoder)
        carrying.chat_template = self.chat_template
        return carrying

    def close(self) -> None:
        """Nothing is held open between batches; here for symmetry with other environments."""

    def _fresh_test_feed(self) -> Feed:
        return Feed(self._test, seed=self.seed, rank=self.rank, world_size=self.world_size, is_shuffled=False)

    def _share_of(self, split: StoredSplit) -> int:
        full, rest = divmod(len(split), self.data_batch_size_per_gpu * self.world_size)
        return full * self.data_batch_size_per_gpu + share_sizes(rest, self.world_size)[self.rank]


def _warn(report: Report) -> None:
    """One warning for a split that lost rows or tokens."""
    told = [f"dropped {count} ({reason.replace('_', ' ')})" for reason, count in sorted(report.dropped.items())]
    if report.cut:
        told.append(f"cut {report.cut}")
    if told:
        warnings.warn(f"{report.split} split: of {report.rows_in} rows, {', '.join(told)}.", UserWarning, stacklevel=4)


def _check_ranks(rank: Any, world_size: Any) -> None:
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{name} is {value!r}; it must be a whole number.")
    if world_size < 1 or not 0 <= rank < world_size:
        raise DataError(f"rank {rank} does not exist in a world of {world_size}; ranks are 0 to world_size - 1.")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name} is {value!r}; it must be a positive whole number.")
