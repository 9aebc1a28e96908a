"""Trackers that are off unless asked for: TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.metrics.log import Record
from agilerl.optional import require

__all__ = ["TensorBoardSink", "WandbSink"]

_STEP_KEYS = frozenset({"kind", "agent", "rows", "iteration"})


def _scalars(record: Record) -> dict[str, float]:
    """Numbers of a record as ``kind/key`` (``kind/agent-2/key`` for all but the first agent)."""
    agent = record.get("agent")
    prefix = f"{record.get('kind', 'train')}/" + (f"agent-{agent}/" if agent not in (None, 0) else "")
    return {
        f"{prefix}{key}": float(value)
        for key, value in record.items()
        if key not in _STEP_KEYS and isinstance(value, (int, float))
    }


class TensorBoardSink:
    """Event files under ``folder``; the step axis is rows."""

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "tensorboard", "Logging to TensorBoard")
        self.folder = Path(folder)
        self._purge: int | None = None
        self._writer: Any = None

    def resume(self, records: int, rows: int) -> None:
        """Let TensorBoard drop what an interrupted run wrote after ``rows``."""
        del records
        self._purge = rows + 1

    def write(self, record: Record) -> None:
        """Add the numbers of one record."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge)
        step = int(record.get("rows") or 0)
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """A Weights & Biases run. Never asks for a login: without a key it records offline.

    Rows are the step axis of every chart and are logged as a value, so points that share a step all arrive.
    """

    def __init__(self, *, config: Mapping[str, Any] | None = None, api_key: str | None = None, **kwargs: Any) -> None:
        self._wandb = require("wandb", "wandb", "Logging to Weights & Biases")
        has_key = bool(api_key or os.environ.get("WANDB_API_KEY"))
        kwargs.setdefault("mode", os.environ.get("WANDB_MODE") or ("online" if has_key else "offline"))
        if api_key and kwargs["mode"] == "online":
            self._wandb.login(key=api_key)
        self.run = self._wandb.init(config=dict(config or {}), **kwargs)
        self.run.define_metric("rows")
        self.run.define_metric("*", step_metric="rows")

    def write(self, record: Record) -> None:
        """Log the numbers of one record."""
        self.run.log({**_scalars(record), "rows": int(record.get("rows") or 0)})

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()
