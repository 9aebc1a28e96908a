"""Plain data: what may go into a checkpoint, and how other number types become it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agilerl.errors import CheckpointError

__all__ = ["json_safe", "plain"]


# First match wins. int(), float() and str() also strip subclasses, which a safe unpickler would not know.
_LEAVES: dict[type, Callable[[Any], Any]] = {
    Tensor: lambda value: value.detach().as_subclass(Tensor),
    enum.Enum: lambda value: plain(value.value),
    np.generic: lambda value: plain(value.item()),
    torch.dtype: lambda value: str(value).removeprefix("torch."),
    torch.device: str,
    PurePath: str,
    int: int,
    float: float,
    str: str,
    bytes: bytes,
}


def plain(value: Any, where: str = "value") -> Any:
    """Turn ``value`` into builtin containers, numbers, texts and CPU-independent tensors.

    NumPy scalars become Python numbers, arrays become tensors, sets become sorted lists, enums their value, dtypes,
    devices and paths text. Tensors stay where they are, detached. The result pickles to something that
    ``torch.load(weights_only=True)`` reads.

    Raises:
        CheckpointError: Anything else, naming the place by ``where``.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    for kind, convert in _LEAVES.items():
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, np.ndarray):
        is_text = value.dtype == object or value.dtype.kind in "US"
        return plain(value.tolist(), where) if is_text else torch.from_numpy(np.array(value))
    if isinstance(value, Mapping):
        return {plain(key, f"key of {where}"): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, AbstractSet):
        items = [plain(item, where) for item in value]
        return sorted(items, key=lambda item: (str(type(item)), item))
    if isinstance(value, Sequence):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds numbers, texts, tensors "
        "and lists or dicts of them only, so convert it or leave it out."
    )


def json_safe(value: Any, where: str = "value") -> Any:
    """As :func:`plain`, and fit for strict JSON: NaN and infinities become ``None``, tensors become (nested) lists."""
    value = plain(value, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return json_safe(value.tolist(), where)
    if isinstance(value, bytes):
        raise CheckpointError(f"{where} holds raw bytes, which JSON cannot carry.")
    if isinstance(value, dict):
        return {str(key): json_safe(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item, where) for item in value]
    return value
