"""Where the time of one ``learn`` call goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["LEARN_PHASES", "PhaseTimer"]

LEARN_PHASES: tuple[str, ...] = ("prepare", "forward", "backward", "grad_sync", "optim", "other")
"""Phases that ``learn`` reports; ``other`` is what is left of the wall time."""


class PhaseTimer:
    """Splits the wall time of a call into named phases that never overlap.

    Phases may nest: time is given to the innermost one. On CUDA, where a Python clock would see the launch of a kernel
    and not its run, boundaries are recorded as events and read once, in :meth:`seconds`.

    Example:
        >>> timer = PhaseTimer()
        >>> with timer.phase("forward"):
        ...     pass
        >>> sorted(timer.seconds())[0]
        'learn_phase_backward_s'
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._cuda = str(device or "cpu").startswith("cuda")
        self._device = device
        self._stack: list[str] = ["other"]
        self._seconds = dict.fromkeys(LEARN_PHASES, 0.0)
        self._events: list[tuple[Any, str]] = []
        self._start = self._last = time.perf_counter()
        if self._cuda:
            self._mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give the time inside the block to ``name``, one of :data:`LEARN_PHASES`."""
        if name not in self._seconds:
            raise ValueError(f"Unknown phase {name!r}; the phases are {', '.join(LEARN_PHASES)}.")
        self._mark()
        self._stack.append(name)
        try:
            yield
        finally:
            self._mark()
            self._stack.pop()

    def credit(self, seconds: Mapping[str, float]) -> None:
        """Give time that passed in no phase to phases, by the keys of :meth:`seconds`: what threads spent on them meanwhile."""
        for name in LEARN_PHASES:
            if name != "other":
                self._seconds[name] += seconds.get(f"learn_phase_{name}_s", 0.0)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, keyed ``learn_phase_<phase>_s``; their sum is the wall time since construction."""
        self._mark()
        if self._cuda:
            self._read_events()
        total = time.perf_counter() - self._start
        timed = {name: spent for name, spent in self._seconds.items() if name != "other"}
        timed["other"] = max(0.0, total - sum(timed.values()))
        return {f"learn_phase_{name}_s": timed[name] for name in LEARN_PHASES}

    def _mark(self) -> None:
        """Close the running segment: it belongs to the phase on top of the stack."""
        if self._cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append((event, self._stack[-1]))
            return
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._last
        self._last = now

    def _read_events(self) -> None:
        self._events[-1][0].synchronize()
        for (begin, _), (end, owner) in zip(self._events, self._events[1:], strict=False):
            self._seconds[owner] += begin.elapsed_time(end) / 1000.0
        del self._events[:-1]
