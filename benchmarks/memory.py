"""Peak memory of a function, in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

__all__ = ["peak_bytes"]


def _child(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # Imports and inputs are not what is measured: the function makes its inputs, then calls what it is given.
    before = 0

    def start() -> None:
        nonlocal before
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    function(start, *arguments)
    connection.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def peak_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """How far `function(start, *arguments)` raises the peak of a fresh process after it has called ``start()``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError("the measured process ended without a result") from None
    finally:
        process.join()
