"""Greedy answers: batched for evaluation, streamed for chat."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from agilerl.errors import DataError

__all__ = ["generate_greedy", "stop_ids", "stream"]


def stop_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, extra: Iterable[int] = ()) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS, those of the model's own settings, and ``extra``."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    many: list[Any] = [*(own if isinstance(own, list | tuple) else [own]), tokenizer.eos_token_id, *extra]
    return sorted({int(one) for one in many if one is not None})


@torch.no_grad()
def generate_greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    batch_size: int = 16,
    progress: Callable[[int], None] | None = None,
    inputs: Sequence[Mapping[str, torch.Tensor] | None] | None = None,
) -> list[list[int]]:
    """Most likely continuation of each prompt, in the order given.

    Prompts of similar length run together, padded on the left so that every answer starts in the same column. The model
    is in eval mode meanwhile and gets its mode back.

    Args:
        model: A causal LM, with or without adapters.
        prompts: Token ids, without padding.
        stop: Ids that end an answer; they are not part of it.
        max_new_tokens: Longest answer.
        batch_size: Prompts that run together.
        progress: Called with the number of answers done so far.
        inputs: Further model inputs of each prompt (its images); a prompt that has some runs alone.
    """
    if any(not len(prompt) for prompt in prompts):
        raise DataError("A prompt without tokens cannot be answered; give it at least one token.")
    device = next(model.parameters()).device
    more = [dict(each or {}) for each in inputs] if inputs is not None else [{}] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda row: (bool(more[row]), len(prompts[row])), reverse=True)
    answers: list[list[int]] = [[] for _ in prompts]
    done = 0
    with _evaluating(model):
        for rows in _batches(order, [bool(each) for each in more], batch_size):
            width = len(prompts[rows[0]])
            ids = torch.full((len(rows), width), stop[0] if stop else 0)  # [B, L]
            mask = torch.zeros_like(ids)
            for place, row in enumerate(rows):
                ids[place, width - len(prompts[row]) :] = torch.as_tensor(prompts[row])
                mask[place, width - len(prompts[row]) :] = 1
            config = _greedy_config(stop, _room(model, width, max_new_tokens))
            own = {name: _as_batch(value).to(device) for name, value in more[rows[0]].items()}
            output = _generate(model, ids.to(device), mask.to(device), config, **own)
            for place, row in enumerate(rows):
                answers[row] = _until_stop(output[place, width:].tolist(), stop)
            done += len(rows)
            if progress is not None:
                progress(done)
    return answers


def _batches(order: Sequence[int], is_alone: Sequence[bool], size: int) -> Iterator[list[int]]:
    """Rows that run together, at most ``size``; those that must run alone do."""
    rows: list[int] = []
    for row in order:
        if rows and (is_alone[row] or is_alone[rows[-1]] or len(rows) == size):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _as_batch(value: torch.Tensor) -> torch.Tensor:
    """An input of one row as that of a batch of one: token-wise ones are [l], all others have their first dimension."""
    return value[None] if value.ndim == 1 else value


def stream(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text of one answer, as they come; leaving the loop early ends the generation too.

    ``temperature`` 0 takes the most likely token each time; above, tokens are drawn from ``seed`` and the global
    generators are left as they were.
    """
    device = next(model.parameters()).device
    ids = torch.as_tensor([list(prompt)], device=device)
    config = _greedy_config(stop, _room(model, len(prompt), max_new_tokens))
    if temperature > 0.0:
        config.do_sample, config.temperature, config.top_k, config.top_p = True, temperature, 0, 1.0
    pieces = _Pieces(tokenizer, frozenset(stop))

    def work() -> None:
        try:
            with _evaluating(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                _generate(model, ids, torch.ones_like(ids), config, streamer=pieces, stopping_criteria=[pieces.stopped])
        except BaseException as error:
            pieces.fail(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield from pieces
    finally:
        pieces.stop()
        worker.join()


class _Pieces(BaseStreamer):
    """Token ids in, whole characters out, across threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._queue: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._answer: list[int] = []
        self._shown = ""
        self._has_prompt = False
        self._is_stopped = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (first call) or a token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._answer.extend(token for token in value.flatten().tolist() if token not in self._stop)
        text = self._text()
        if not text.endswith("\ufffd"):  # half a character: wait for the rest of its bytes
            self._show(text)

    def end(self) -> None:
        """The answer is complete."""
        self._show(self._text())
        self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the pieces are read."""
        self._queue.put(error)

    def stop(self) -> None:
        """End the generation after the token in work."""
        self._is_stopped = True

    def stopped(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Stopping criterion of ``generate``."""
        return torch.full((input_ids.shape[0],), self._is_stopped, device=input_ids.device)

    def __iter__(self) -> Iterator[str]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._answer, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > len(self._shown):
            self._queue.put(text[len(self._shown) :])
            self._shown = text


def _generate(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, config: GenerationConfig, **kwargs: Any
) -> torch.Tensor:
    generate: Any = model.generate
    return generate(input_ids=ids, attention_mask=mask, generation_config=config, **kwargs)


def _room(model: nn.Module, width: int, wanted: int) -> int:
    """New tokens that fit into the model's positions after ``width`` tokens."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return wanted
    if width >= positions:
        raise DataError(
            f"The prompt has {width:,} tokens and leaves no room for an answer; the model reads {positions:,}."
        )
    return min(wanted, positions - width)


def _greedy_config(stop: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=list(stop) or None,
        pad_token_id=stop[0] if stop else 0,
        use_cache=True,
    )


def _until_stop(ids: list[int], stop: Sequence[int]) -> list[int]:
    ends = [place for place, token in enumerate(ids) if token in stop]
    return ids[: ends[0]] if ends else ids


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
