"""A run in a few lines, or in a picture, from the records it wrote."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from agilerl.errors import DataError, OutputError
from agilerl.metrics.log import Record
from agilerl.optional import require

__all__ = ["plot_run", "read_records", "summarise"]

_TEXT_COLUMNS = frozenset({"kind", "message"})
_PANELS = (
    ("loss", "loss"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "trained tokens/s"),
)


def read_records(path: str | Path) -> list[Record]:
    """The records of a metrics.csv or metrics.jsonl.

    Raises:
        DataError: The file does not exist or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from None
    lines = text.splitlines()
    if path.suffix == ".jsonl":
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise DataError(f"{path} holds a line that is not JSON: {error}.") from None
    if not lines or "kind" not in lines[0].split(","):
        raise DataError(f"{path} is no metrics file: its first line must name the columns, 'kind' among them.")
    return [{key: _value(key, cell) for key, cell in row.items()} for row in csv.DictReader(lines)]


def _value(key: str, cell: str) -> float | int | str | None:
    if key in _TEXT_COLUMNS:
        return cell
    if cell == "":
        return None
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return float(cell)
    except ValueError:
        return cell


def summarise(records: Iterable[Record]) -> str:
    """Rows, losses, speed, memory and time of a run, one fact a line; several agents one after the other."""
    by_agent: dict[object, list[Record]] = {}
    for record in records:
        by_agent.setdefault(record.get("agent"), []).append(record)
    parts = []
    for agent, own in by_agent.items():
        lines = _facts(
            [one for one in own if one.get("kind") == "train"], [one for one in own if one.get("kind") == "eval"]
        )
        if lines:
            parts.append("\n".join([*([f"agent {agent}"] if len(by_agent) > 1 else []), *lines]))
    return "\n\n".join(parts)


def _facts(train: Sequence[Record], held_out: Sequence[Record]) -> list[str]:
    lines = []
    if train:
        rows, losses = _numbers(train, "rows"), _numbers(train, "loss")
        lines.append(f"trained    {int(max(rows, default=0)):,} rows, {int(sum(_numbers(train, 'tokens'))):,} tokens")
        if losses:
            lines.append(f"loss       {losses[0]:.4f} -> {losses[-1]:.4f}")
    scored = [(loss, one) for one in held_out for loss in _numbers([one], "loss")]
    if scored:
        best, where = min(scored, key=lambda pair: pair[0])
        lines.append(
            f"held out   {scored[0][0]:.4f} -> {scored[-1][0]:.4f}, best {best:.4f} after {where.get('rows'):,} rows"
        )
    speeds = _numbers(train, "tokens_per_s")
    if speeds:
        lines.append(f"speed      {sum(speeds) / len(speeds):,.0f} trained tokens/s")
    for label, key, form in (("memory", "peak_memory_gib", "{:.2f} GiB at most"), ("time", "elapsed_s", "{}")):
        values = _numbers([*train, *held_out], key)
        if values:
            most = max(values)
            lines.append(f"{label:<11}{form.format(timedelta(seconds=round(most)) if key == 'elapsed_s' else most)}")
    return lines


def _numbers(records: Iterable[Record], key: str) -> list[float]:
    values = (record.get(key) for record in records)
    return [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]


def plot_run(records: Sequence[Record], path: str | Path) -> Path:
    """Draw loss (trained and held out), learning rate, gradient norm and speed over rows, a line for each agent.

    Args:
        records: As :func:`read_records` gives them, or a log's history.
        path: Picture to write; its ending decides the format (png, svg, pdf).

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: The file cannot be written.
    """
    require("matplotlib", "plots", "Drawing a run")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)  # a figure of its own: no window, no global state of pyplot
    axes: Any = figure.subplots(2, 2)
    for axis, (key, title) in zip(axes.flat, _PANELS, strict=True):
        for agent in sorted({record.get("agent") or 0 for record in records}, key=str):
            for kind, style in (("train", "-"), ("eval", "o--")):
                points = _points(records, kind, agent, key)
                if points:
                    label = f"agent {agent}, {'trained' if kind == 'train' else 'held out'}"
                    axis.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
        axis.set_title(title)
        axis.set_xlabel("rows")
        axis.grid(alpha=0.3)
    if axes.flat[0].lines:
        axes.flat[0].legend(fontsize="small")
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} cannot be written: {error}.") from None
    return path


def _points(records: Iterable[Record], kind: str, agent: object, key: str) -> list[tuple[float, float]]:
    mine = (one for one in records if one.get("kind") == kind and (one.get("agent") or 0) == agent)
    return [(x[0], y[0]) for one in mine if (x := _numbers([one], "rows")) and (y := _numbers([one], key))]
