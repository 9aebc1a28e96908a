"""Model inputs besides tokens: how those of several rows become those of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agilerl.errors import DataError
from agilerl.models.microbatch import Sample

__all__ = ["PLAIN_INPUTS", "join_extras", "stack_inputs"]

PLAIN_INPUTS = frozenset({"pixel_values", "pixel_attention_mask", "image_sizes"})
"""Inputs that only fill in the embeddings of image tokens: positions stay one-dimensional and attention causal, so rows
that have them can be packed like any others."""


def join_extras(
    samples: Sequence[Sample], lengths: Sequence[int], spread: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Join the further inputs of the rows: token-wise ones like the ids, all others one after another.

    Rows without token types are text (0). Arrays of images of several sizes are filled up with zeros where the model
    is told about it by a mask, by sizes or by the count of images.

    Raises:
        DataError: The inputs do not go together.
    """
    names = dict.fromkeys(name for sample in samples for name in sample.extra or {})
    joined: dict[str, Tensor] = {}
    for name in names:
        held = [(sample.extra or {}).get(name) for sample in samples]
        if name.endswith("token_type_ids"):
            held = [torch.zeros(n, dtype=torch.long) if v is None else v for v, n in zip(held, lengths, strict=True)]
        present = [(v, n) for v, n in zip(held, lengths, strict=True) if v is not None]
        values = [value.cpu() for value, _ in present]
        token_wise = all(value.ndim == 1 and len(value) == n for value, n in present)
        if token_wise and len(values) != len(samples):
            raise DataError(f"The input {name!r} is missing in some rows; give it for every row or for none.")
        is_told = bool({"pixel_attention_mask", "image_sizes"} & names.keys())
        joined[name] = spread(torch.cat(values)) if token_wise else stack_inputs(name, values, is_told=is_told)
    return joined


def stack_inputs(name: str, values: Sequence[Tensor], *, is_told: bool = False) -> Tensor:
    """Join along the first dimension, with zeros where shapes differ and the model can tell.

    Args:
        name: Of the input, for the sentence.
        values: One or more tensors, [n, ...].
        is_told: Whether another input says which part of each image is real.

    Raises:
        DataError: Shapes differ and nothing would tell the model.
    """
    shapes = [tuple(value.shape[1:]) for value in values]
    if len(set(shapes)) == 1:
        return torch.cat(list(values))
    ndims = {len(shape) for shape in shapes}
    common = [max(sizes) for sizes in zip(*shapes, strict=False)]
    first = min(ndims) - 1
    only_count = first >= 3 and all(shape[1:] == shapes[0][1:] for shape in shapes)  # [images, parts, channels, H, W]
    if len(ndims) > 1 or not (is_told or only_count):
        raise DataError(
            f"The input {name!r} has shapes {sorted(set(shapes))} in one batch, and the model is not told which part is "
            "real; let the processor resize all images to one size, or use micro_batch_size_per_gpu=1."
        )
    whole = values[0].new_zeros((sum(len(value) for value in values), *common))
    start = 0
    for value in values:
        whole[(slice(start, start + len(value)), *(slice(0, size) for size in value.shape[1:]))] = value
        start += len(value)
    return whole
