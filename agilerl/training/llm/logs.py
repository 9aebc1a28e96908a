"""Where the records of a run go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agilerl.metrics import MetricsLog
from agilerl.metrics.log import Sink
from agilerl.metrics.sinks import ConsoleSink, CSVSink, TensorBoardSink, WandbSink

__all__ = ["RunLog", "open_log"]


class RunLog:
    """A ``MetricsLog`` that stamps each record with the time since the run began, resumed parts added up."""

    def __init__(self, metrics: MetricsLog) -> None:
        self.metrics = metrics
        self._began = time.perf_counter()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log one record."""
        self.metrics.log({**record, "elapsed_s": self.elapsed_s})

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"metrics": self.metrics.state_dict(), "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.metrics.load_state_dict(state["metrics"])
        self._began = time.perf_counter() - float(state["elapsed_s"])


@contextmanager
def open_log(
    *,
    is_main: bool,
    total_rows: int | None,
    verbose: bool,
    wb: bool,
    wandb_api_key: str | None,
    wandb_kwargs: Mapping[str, Any] | None,
    tensorboard: bool,
    tensorboard_log_dir: str | Path | None,
    csv: bool,
    csv_log_dir: str | Path | None,
    sinks: Sequence[Sink],
    metadata: Mapping[str, Any],
) -> Iterator[RunLog]:
    """Open the asked-for sinks, on the main rank only, and close them at the end whatever happens."""
    chosen: list[Sink] = []
    if is_main:
        if verbose:
            chosen.append(ConsoleSink(total_rows))
        if csv:
            chosen.append(CSVSink(Path(csv_log_dir or "csv_logs") / "metrics.csv"))
        if tensorboard:
            chosen.append(TensorBoardSink(tensorboard_log_dir or "tensorboard_logs"))
        if wb:
            chosen.append(WandbSink(config=metadata, api_key=wandb_api_key, **(wandb_kwargs or {})))
        chosen.extend(sinks)
    log = RunLog(MetricsLog(chosen))
    try:
        yield log
    finally:
        log.metrics.close()
