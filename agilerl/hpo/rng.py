"""A random generator whose state is plain data, so that a checkpoint can hold it and anyone can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agilerl.errors import CheckpointError

__all__ = ["load_rng_state", "make_rng", "rng_state"]

_KIND = "PCG64"


def make_rng(seed: int | None) -> np.random.Generator:
    """Return a generator of its own; ``None`` seeds it from the operating system."""
    return np.random.Generator(np.random.PCG64(seed))


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state as text and numbers (128-bit integers as hexadecimal text)."""
    state = rng.bit_generator.state
    return {
        "kind": _KIND,
        "state": hex(state["state"]["state"]),
        "inc": hex(state["state"]["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def load_rng_state(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Continue from what ``rng_state`` returned.

    Raises:
        CheckpointError: It is the state of something else.
    """
    if state.get("kind") != _KIND:
        raise CheckpointError(f"Expected the state of a {_KIND} generator, found {state.get('kind')!r}.")
    rng.bit_generator.state = {
        "bit_generator": _KIND,
        "state": {"state": int(state["state"], 16), "inc": int(state["inc"], 16)},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
