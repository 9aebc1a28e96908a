"""Progress for a person: a live line on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from agilerl.metrics.log import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ConsoleSink"]


class ConsoleSink:
    """Rows, trained tokens/s, loss, learning rate and time left.

    Args:
        total_rows: Rows to be trained per agent; ``None`` when unknown (a stream without a budget).
        console: Where to write; default: standard error, so that results on standard output stay clean.
        live: ``None``: a live display if the console is a terminal, else plain lines.
        every_s: Least time between two plain lines of training.
    """

    def __init__(
        self,
        total_rows: int | None = None,
        *,
        console: Console | None = None,
        live: bool | None = None,
        every_s: float = 10.0,
    ) -> None:
        if console is None:
            from rich.console import Console

            console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.console = console
        self.total_rows = total_rows
        self._is_live = console.is_terminal if live is None else live
        self._every_s = every_s
        self._last_line: float | None = None
        self._progress: Progress | None = None
        self._tasks: dict[object, TaskID] = {}
        self._started = time.perf_counter()
        self._first_rows: int | None = None

    def resume(self, records: int, rows: int) -> None:
        """Count speed and time left from ``rows`` on."""
        del records
        self._first_rows = rows

    def write(self, record: Record) -> None:
        """Show one record."""
        kind = record.get("kind")
        if kind == "train":
            if self._is_live:
                self._update(record)
            else:
                self._training_line(record)
        elif kind == "eval":
            self._say(_evaluation_text(record, self.total_rows))
        else:
            text = record.get("message") or ", ".join(
                f"{key} {value}" for key, value in record.items() if value is not None
            )
            self._say(str(text))

    def close(self) -> None:
        """Stop the live display, leaving its last state."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        target = self._progress.console if self._progress is not None else self.console
        target.print(text, markup=False, highlight=False)

    def _training_line(self, record: Record) -> None:
        now = time.perf_counter()
        rows = _number(record, "rows")
        if self._first_rows is None:
            self._first_rows = 0
        is_last = self.total_rows is not None and rows >= self.total_rows
        if self._last_line is not None and now - self._last_line < self._every_s and not is_last:
            return
        self._last_line = now
        left = self._time_left(rows)
        self._say("  ".join(part for part in (_rows_text(record, self.total_rows), _speed_text(record), left) if part))

    def _time_left(self, rows: float) -> str:
        done = rows - (self._first_rows or 0)
        if not self.total_rows or done <= 0:
            return ""
        seconds = (time.perf_counter() - self._started) / done * max(0.0, self.total_rows - rows)
        return f"{timedelta(seconds=round(seconds))} left"

    def _update(self, record: Record) -> None:
        progress = self._progress or self._start_progress()
        agent = record.get("agent")
        rows = int(_number(record, "rows"))
        if agent not in self._tasks:
            label = "training" if not self._tasks else f"agent {agent}"
            if len(self._tasks) == 1:
                first, task = next(iter(self._tasks.items()))
                progress.update(task, description=f"agent {first}")
            self._tasks[agent] = progress.add_task(
                label, total=self.total_rows, completed=self._first_rows or 0, speed=""
            )
        progress.update(self._tasks[agent], completed=rows, speed=_speed_text(record))

    def _start_progress(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rows"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            refresh_per_second=4,
        )
        self._progress.start()
        return self._progress


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _rows_text(record: Record, total: int | None) -> str:
    rows = int(_number(record, "rows"))
    of_total = f"/{total:,}" if total else ""
    agent = record.get("agent")
    return f"{f'agent {agent}  ' if agent not in (None, 0) else ''}rows {rows:,}{of_total}"


def _speed_text(record: Record) -> str:
    parts = []
    if record.get("tokens_per_s") is not None:
        parts.append(f"{_number(record, 'tokens_per_s'):,.0f} trained tok/s")
    if record.get("loss") is not None:
        parts.append(f"loss {_number(record, 'loss'):.4f}")
    if record.get("lr") is not None:
        parts.append(f"lr {_number(record, 'lr'):.2e}")
    return "  ".join(parts)


def _evaluation_text(record: Record, total: int | None) -> str:
    parts = [_rows_text(record, total), "held out:"]
    if record.get("loss") is not None:
        parts.append(f"loss {_number(record, 'loss'):.4f}")
    elif record.get("fitness") is not None:
        parts.append(f"fitness {_number(record, 'fitness'):.4f}")
    if record.get("perplexity") is not None:
        parts.append(f"perplexity {_number(record, 'perplexity'):.3f}")
    return "  ".join(parts)
