"""Dimensions of Gymnasium spaces, read without importing Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agilerl.errors import ConfigError

__all__ = ["action_dim", "state_dim"]


def state_dim(space: Any) -> Any:
    """Input size of a network for a space: a shape; a dict of shapes for a dict space or mapping, a tuple for others.

    A discrete space counts as its one-hot vector, a multi-discrete one as the joined one-hot vectors.

    Raises:
        ConfigError: The kind of space is unknown.
    """
    parts = _parts(space)
    if parts is not None:
        return _map(state_dim, parts)
    if hasattr(space, "nvec"):
        return (int(sum(space.nvec)),)
    if hasattr(space, "low"):
        return tuple(int(n) for n in space.shape)
    if hasattr(space, "n"):
        return (int(space.n),) if not getattr(space, "shape", ()) else tuple(int(n) for n in space.shape)
    raise _unknown(space)


def action_dim(space: Any) -> Any:
    """Output size of a network for a space: an int; a dict for a dict space or mapping, a tuple for other collections.

    Raises:
        ConfigError: The kind of space is unknown.
    """
    parts = _parts(space)
    if parts is not None:
        return _map(action_dim, parts)
    if hasattr(space, "nvec"):
        return int(sum(space.nvec))
    if hasattr(space, "low"):
        return math.prod(int(n) for n in space.shape)
    if hasattr(space, "n"):
        return int(space.n) if not getattr(space, "shape", ()) else math.prod(int(n) for n in space.shape)
    raise _unknown(space)


def _parts(space: Any) -> Any:
    """The members of a collection of spaces, or None for a single space."""
    if isinstance(space, (Mapping, list, tuple)):
        return space
    return getattr(space, "spaces", None)


def _map(dim: Any, parts: Any) -> Any:
    if isinstance(parts, Mapping):
        return {name: dim(part) for name, part in parts.items()}
    return tuple(dim(part) for part in parts)


def _unknown(space: Any) -> ConfigError:
    return ConfigError(
        f"Cannot read the dimension of {type(space).__name__}; pass a Gymnasium Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict or Tuple space, or a list or dict of them."
    )
