"""Ctrl-C and SIGTERM: stop at the next safe point, with everything saved; a second one quits at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["STOPPED", "Interrupted", "Stop", "Terminated", "stop_signals"]

log = logging.getLogger(__name__)

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_EXIT = {"Ctrl-C": 130, "SIGTERM": 143}  # 128 + signal number, as shells have it
_QUIT = {"Ctrl-C": 131, "SIGTERM": 144}
"""Exit codes after a second signal, when nothing more was saved."""


class Interrupted(KeyboardInterrupt):
    """Training stopped after Ctrl-C.

    Attributes:
        path: Checkpoint to go on from, or None where there was nothing to save.
        signal: ``"Ctrl-C"``.
        exit_code: 130.
    """

    signal = "Ctrl-C"

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(_message(self.signal, path))
        self.path = path
        self.exit_code = _EXIT[self.signal]


class Terminated(SystemExit):
    """Training stopped after SIGTERM; left alone, it ends the process with code 143.

    Attributes:
        path: Checkpoint to go on from, or None where there was nothing to save.
        signal: ``"SIGTERM"``.
        exit_code: 143.
    """

    signal = "SIGTERM"

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(_EXIT[self.signal])
        self.path = path
        self.exit_code = _EXIT[self.signal]

    def __str__(self) -> str:
        return _message(self.signal, self.path)


STOPPED = (Interrupted, Terminated)
"""What ``except`` should name to catch either."""


def _message(name: str, path: Path | None) -> str:
    return f"Stopped by {name}; " + (f"saved to {path}." if path is not None else "there was nothing to save yet.")


class Stop:
    """Whether someone asked to stop, and what is to be done about it."""

    def __init__(self) -> None:
        self.requested: str | None = None
        """``"Ctrl-C"``, ``"SIGTERM"`` or None."""
        self.path: Path | None = None
        """Where the last checkpoint went, once there is one."""
        self._deferred = 0

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Note the first signal, or stop at once where nothing can be lost; quit on the second."""
        name = _NAMES[signal.Signals(number)]
        if self.requested is not None:
            _quit(_QUIT[name])
        self.requested = name
        if not self._deferred:
            self.finish()
        log.warning("%s: saving at the next safe point. Again to quit at once.", name)

    def finish(self) -> NoReturn:
        """End training with the exception of the signal that came (Ctrl-C where none did, but did on another rank)."""
        raise (Terminated if self.requested == "SIGTERM" else Interrupted)(self.path)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal is only noted; whoever trains looks at ``requested``, saves, and calls :meth:`finish`."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if self.requested is not None and not self._deferred:
            self.finish()


def _quit(code: int) -> NoReturn:
    """Leave without unwinding: no writer is waited for, the checkpoint that is complete stays."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a progress display may have hidden the cursor
    os._exit(code)


_active: Stop | None = None


@contextmanager
def stop_signals(*, defer: bool = True) -> Iterator[Stop]:
    """Watch for Ctrl-C and SIGTERM inside the block.

    Blocks nest: the inner one shares the outer one's :class:`Stop`. Outside the main thread, where Python allows no
    handlers, nothing is watched and ``requested`` stays None.

    Args:
        defer: True: only note the signal (training). False: stop at once until an inner block defers (preparation).
    """
    global _active
    if _active is not None:
        stop = _active
        with stop.deferred() if defer else _nothing():
            yield stop
        return
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in _NAMES}
    _active = stop
    try:
        with stop.deferred() if defer else _nothing():
            yield stop
    finally:
        _active = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
