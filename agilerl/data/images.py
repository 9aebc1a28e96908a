"""Rows with images: which images a row has, what they become, and where their tokens stand.

A chat template writes one placeholder for each image. The row is tokenised with it like any other, and each placeholder is
then replaced by what the model's processor makes of that image; those tokens are never trained. Pixels are made when a
batch is, so that memory does not grow with the images.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agilerl.data.formats import Format
from agilerl.data.image_rows import IMAGE_COLUMNS, IMAGE_PARTS, REFERENCES
from agilerl.data.records import Chat, Example, Message, Pair, Record, Reply, Row, RowFault, Span
from agilerl.errors import DataError
from agilerl.optional import require

__all__ = [
    "ImageFormat",
    "ImageProcessor",
    "ImageTokenizer",
    "Pictured",
    "Pictures",
    "tokenizer_of",
]


@dataclass(frozen=True, slots=True)
class Pictured:
    """A canonical row with its images, in the order of their placeholders."""

    record: Chat | Reply
    images: tuple[Any, ...]
    """As the row holds them: PIL images, paths, or ``{"bytes": ..., "path": ...}``."""


@dataclass
class ImageFormat:
    """Another format, whose rows may have images: a column of them, or image parts of messages."""

    inner: Format
    num_pictured: int = 0
    """Records with images so far."""

    @property
    def name(self) -> str:
        """What the summary calls it."""
        return self.inner.name

    @property
    def columns(self) -> dict[str, str]:
        """The column that plays each part."""
        return {**self.inner.columns, **{name: name for name in IMAGE_COLUMNS}}

    def convert(self, row: Row) -> list[Any]:
        """Canonical rows; one with images is a `Pictured`.

        Raises:
            RowFault: The record cannot be used.
        """
        held = next((row[name] for name in IMAGE_COLUMNS if row.get(name) is not None), [])
        held = list(held) if isinstance(held, list | tuple) else [held]
        records = self.inner.convert(row)
        found: list[Any] = [_pictured(record, held) for record in records]
        has_pictures = any(isinstance(record, Pictured) for record in found)
        self.num_pictured += has_pictures
        if len(found) > 1 and has_pictures:
            raise RowFault("bad_image", "has images and gives several rows; make it one record for each")
        return found


def _pictured(record: Record, held: list[Any]) -> Record | Pictured:
    if isinstance(record, Pair):  # with or without images, so that all rows of a split look alike
        record = Reply([{"role": "user", "content": record.prompt}], record.response)
    if not isinstance(record, Chat | Reply):
        if not held:
            return record
        raise RowFault("bad_image", "has images, which only prompts and chats can have")
    images: list[Any] = []
    waiting = list(held)
    messages = [_without_images(message, images, waiting) for message in record.messages]
    if waiting and len(waiting) < len(held):
        raise RowFault("image_count", f"has {len(held)} images but {len(held) - len(waiting)} image parts")
    if waiting:
        place = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
        if place is None:
            raise RowFault("bad_image", "has images and no turn of the user to show them in")
        messages[place] = messages[place] | {"content": _shown(messages[place].get("content"), len(waiting))}
        images = waiting + images
    return Pictured(replace(record, messages=messages), tuple(images)) if images else record


def _without_images(message: Message, images: list[Any], waiting: list[Any]) -> Message:
    """The message with bare image parts; what they show is appended to ``images``."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            own = next((part[name] for name in REFERENCES if part.get(name) is not None), None)
            if own is None and not waiting:
                raise RowFault("image_count", "has an image part without an image")
            images.append(waiting.pop(0) if own is None else own)
            part = {"type": "image"}
        parts.append(part)
    return message | {"content": parts}


def _shown(content: Any, count: int) -> list[Any]:
    """A user's turn with images: where its text says ``<image>`` just as often, else before its text."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if isinstance(content, str) and content.count("<image>") == count:
        texts = content.split("<image>")
        parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for text in texts[1:]:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        return parts
    return [{"type": "image"}] * count + parts


def tokenizer_of(encoder: Any) -> Any:
    """The tokenizer itself, of a tokenizer or of a processor that has one."""
    return encoder.tokenizer if hasattr(encoder, "image_processor") else encoder


class ImageProcessor:
    """A processor of transformers as the rest of the room sees it.

    Args:
        processor: Turns images and placeholders into model inputs.
        tokenizer: Encodes the rows.

    Raises:
        DataError: It takes no images, or its tokens are not the tokenizer's.
    """

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        image_token = getattr(processor, "image_token", None)
        if image_token is None or not hasattr(processor, "image_processor"):
            raise DataError(f"processor is a {type(processor).__name__}, which takes no images; give the model's own.")
        require("PIL", "vision", "Rows with images")
        self.processor = processor
        self.placeholder = str(getattr(processor, "boi_token", None) or image_token)
        self.placeholder_id = tokenizer.convert_tokens_to_ids(self.placeholder)
        self.image_id = processor.tokenizer.convert_tokens_to_ids(str(image_token))
        own = processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        if self.placeholder_id is None or self.placeholder_id != own:
            raise DataError(
                f"The tokenizer's {self.placeholder!r} is another token than the processor's; use processor.tokenizer."
            )

    @property
    def chat_template(self) -> str | None:
        """The processor's own template."""
        template = getattr(self.processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def __call__(self, image: Any) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids that stand for an image, and the model's further inputs for it.

        Raises:
            RowFault: The image cannot be read or processed.
        """
        picture = _open(image)
        try:
            made = self.processor(
                text=[self.placeholder], images=[picture], return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # processors raise anything; told to the user with the row's number
            raise RowFault("bad_image", f"has an image that the processor refuses ({error})") from None
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        inputs = {n: v[0] if n.endswith("token_type_ids") else v for n, v in inputs.items()}
        if self.image_id not in ids:
            raise RowFault("bad_image", "has an image of which the processor makes no token")
        return ids, inputs


def _open(image: Any) -> Any:
    from PIL import Image

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path") or image.get("url")
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
        raise RowFault("bad_image", "has an image given by address; store it as a file and give its path")
    if not isinstance(image, str | bytes | Path):
        raise RowFault("bad_image", f"has a {type(image).__name__} for an image; give a PIL image, a path or bytes")
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError) as error:
        raise RowFault("bad_image", f"has an image that cannot be opened ({error})") from None


class ImageTokenizer:
    """Tokenises rows of any kind, with or without images.

    Args:
        inner: Tokenises rows without images.
        processor: Makes tokens of images.
    """

    def __init__(self, inner: Callable[[Sequence[Any]], list[Any]], processor: ImageProcessor) -> None:
        self._inner, self._processor = inner, processor

    def __call__(self, records: Sequence[Any]) -> list[Any]:
        """An example, or what is wrong with it, for each record."""
        outcomes = self._inner([record.record if isinstance(record, Pictured) else record for record in records])
        finished: list[Any] = []
        for record, outcome in zip(records, outcomes, strict=True):
            images = record.images if isinstance(record, Pictured) else ()
            try:
                finished.append(outcome if isinstance(outcome, RowFault) else self._expand(outcome, images))
            except RowFault as fault:
                finished.append(fault)
        return finished

    def _expand(self, example: Example, images: Sequence[Any]) -> Example:
        processor = self._processor
        places = np.flatnonzero(example.ids == processor.placeholder_id).tolist()
        if len(places) != len(images):
            raise RowFault("image_count", f"has {len(images)} images, but {len(places)} places for one in its text")
        if not images:
            return example
        runs = [processor(image)[0] for image in images]
        pieces: list[Any] = []
        spans = list(example.spans)
        prompt_length, image_end, start = example.prompt_length, 0, 0
        for place, run in zip(places, runs, strict=True):
            pieces += [example.ids[start:place], np.array(run, dtype=np.int32)]
            start = place + 1
        # From the last place to the first, so that earlier positions stay valid.
        for place, run in zip(reversed(places), reversed(runs), strict=True):
            spans = [piece for span in spans for piece in _around(span, place, len(run))]
            prompt_length += len(run) - 1 if prompt_length > place else 0
            image_end = image_end + len(run) - 1 if image_end else place + len(run)
        ids = np.concatenate([*pieces, example.ids[start:]])
        digest = hashlib.blake2b(digest_size=16)
        for image in images:
            picture = _open(image)
            digest.update(repr(picture.size).encode() + picture.tobytes())
        return replace(
            example,
            ids=ids,
            spans=tuple(spans),
            prompt_length=spans[0].start if spans and spans[0].start > prompt_length else prompt_length,
            head_length=max(example.head_length, min(image_end, prompt_length)),
            image_end=image_end,
            image_digest=digest.digest(),
        )


def _around(span: Span, place: int, size: int) -> list[Span]:
    """A trained run once the token at ``place`` has become ``size`` untrained ones."""
    if place >= span.end:
        return [span]
    grown = size - 1
    if place < span.start:
        return [Span(span.start + grown, span.end + grown, span.weight)]
    parts = (Span(span.start, place, span.weight), Span(place + size, span.end + grown, span.weight))
    return [part for part in parts if part.end > part.start]


class Pictures:
    """The model inputs of a split's images, made when asked for.

    Args:
        row_of: Gives the record with a number.
        format_: Finds its images.
        processor: Makes inputs of them.
    """

    def __init__(self, row_of: Callable[[int], Row], format_: ImageFormat, processor: ImageProcessor) -> None:
        self._row_of, self._format, self._processor = row_of, format_, processor

    def inputs(self, number: int, ids: NDArray[np.int32]) -> dict[str, Tensor] | None:
        """Further inputs of a tokenised record: pixels joined over its images, token types [l]; None without images.

        Raises:
            DataError: The images have changed since the record was tokenised.
        """
        record = self._format.convert(self._row_of(number))[0]
        if not isinstance(record, Pictured):
            return None
        try:
            made = [self._processor(image) for image in record.images]
        except RowFault as fault:
            raise DataError(f"Record {number} {fault.message}; it could be read when the data was prepared.") from None
        inputs: dict[str, list[Tensor]] = {}
        types = {name: torch.zeros(len(ids), dtype=torch.long) for _, each in made for name in each if _is_typed(name)}
        tokens, start = ids.tolist(), 0
        for run, each in made:
            start = _find(tokens, run, start)
            if start < 0:
                raise DataError(
                    f"The images of record {number} have changed since it was tokenised; make the data again."
                )
            for name, value in each.items():
                if _is_typed(name):
                    types[name][start : start + len(run)] = value
                else:
                    inputs.setdefault(name, []).append(value)
            start += len(run)
        return {name: _join(values) for name, values in inputs.items()} | types


def _is_typed(name: str) -> bool:
    return name.endswith("token_type_ids")


def _find(tokens: list[int], run: list[int], start: int) -> int:
    """Where ``run`` stands in ``tokens`` from ``start`` on, or -1."""
    return next((i for i in range(start, len(tokens) - len(run) + 1) if tokens[i : i + len(run)] == run), -1)


def _join(values: list[Tensor]) -> Tensor:
    """One after another; smaller ones are filled up with zeros, as processors do."""
    common = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        missing = [
            amount for have, want in zip(value.shape[:0:-1], common[::-1], strict=True) for amount in (0, want - have)
        ]
        padded.append(torch.nn.functional.pad(value, missing) if any(missing) else value)
    return torch.cat(padded)
