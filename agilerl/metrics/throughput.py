"""Speed and memory of a run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

__all__ = ["Throughput", "peak_memory_gib", "resident_memory_gib"]

_GIB = 1024.0**3


class Throughput:
    """Trained and real tokens per second over a sliding window of updates.

    Args:
        window: Updates that the speed is an average over; few enough to follow a change, many enough to be steady.
    """

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._marks: list[tuple[float, int, int]] = [(time.perf_counter(), 0, 0)]

    def update(self, trained_tokens: int, real_tokens: int | None = None) -> None:
        """Count one ``learn`` call: tokens that were targets, and tokens that the model read."""
        _, trained, real = self._marks[-1]
        self._marks.append((time.perf_counter(), trained + trained_tokens, real + (real_tokens or 0)))
        del self._marks[: -self._window - 1]

    def pause(self) -> None:
        """Leave the time since the last update out (evaluation, saving)."""
        shift = time.perf_counter() - self._marks[-1][0]
        self._marks = [(when + shift, trained, real) for when, trained, real in self._marks]

    def rates(self) -> dict[str, float | None]:
        """``tokens_per_s`` (trained) and ``real_tokens_per_s``; ``None`` before the first update."""
        (begin, trained_0, real_0), (end, trained_1, real_1) = self._marks[0], self._marks[-1]
        seconds = end - begin
        if len(self._marks) < 2 or seconds <= 0.0:
            return {"tokens_per_s": None, "real_tokens_per_s": None}
        real = (real_1 - real_0) / seconds if real_1 > real_0 else None
        return {"tokens_per_s": (trained_1 - trained_0) / seconds, "real_tokens_per_s": real}


def peak_memory_gib(device: object = "cpu") -> float | None:
    """Largest memory in use so far: allocated memory of a CUDA device, else resident memory of this process.

    ``None`` where the system does not tell (Windows).
    """
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(torch.device(str(device))) / _GIB
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1.0 if sys.platform == "darwin" else 1024.0) / _GIB


def resident_memory_gib() -> float | None:
    """Memory of this process right now; ``None`` where ``/proc`` does not exist."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
