"""Who came from whom: one line of JSON per member and generation, and a table for a person."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LINEAGE_FILE", "lineage_table", "read_lineage", "winning_settings", "write_lineage"]

LINEAGE_FILE = "lineage.jsonl"

LineageRow = dict[str, Any]
"""Keys: ``generation``, ``place`` in the population, ``agent`` (index), ``parent_place`` and ``parent`` (index of the
parent in the generation before, null at first), ``rows`` trained, ``fitness`` that selection saw (measured with these very
weights; null at first), ``is_elite``, ``mutation`` (name, old, new; null for none), ``hyperparameters`` it goes on with.
The closing rows have ``"final": true`` and the fitness on the whole test split."""


def write_lineage(path: Path, rows: Iterable[LineageRow]) -> None:
    """Replace the file by these rows in one step; it is small, so the whole of it is written each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read_lineage(path: str | Path) -> list[LineageRow]:
    """Read a lineage file, or the one in a checkpoint folder.

    Raises:
        DataError: There is none, or a line is not one of ours.
    """
    path = Path(path)
    file = path / LINEAGE_FILE if path.is_dir() else path
    if not file.exists():
        raise DataError(f"There is no lineage at {file}; runs with selection write one into their checkpoint folder.")
    rows: list[LineageRow] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({**row, "generation": int(row["generation"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"Line {number} of {file} is not a lineage row.") from error
    return rows


def lineage_table(rows: Sequence[LineageRow]) -> Table:
    """Return the lineage as a table: a line per member, oldest generation first."""
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["hyperparameters"]))
    table = Table(title="Lineage", title_justify="left")
    for header in ("gen.", "agent", "from", "fitness", "mutation", *names):
        table.add_column(header, justify="left" if header == "mutation" else "right", no_wrap=True)
    for row in rows:
        mutation = row["mutation"]
        table.add_row(
            "end" if row.get("final") else str(row["generation"]),
            f"{row['agent']}{' *' if row['is_elite'] else ''}",
            "-" if row["parent"] is None else str(row["parent"]),
            "-" if row["fitness"] is None else f"{row['fitness']:.4f}",
            "-" if mutation is None else f"{mutation['name']} {mutation['old']:.3g} -> {mutation['new']:.3g}",
            *(_short(row["hyperparameters"].get(name)) for name in names),
        )
    table.caption = "* the elite; fitness is held out, higher is better"
    return table


def winning_settings(agent: Any) -> dict[str, Any]:
    """Return the values of an agent's mutable hyper-parameters, for the ``sft`` or ``dpo`` section of a config."""
    return {name: _plain(getattr(agent, name)) for name in agent.hp_config.names()}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _finite(row: LineageRow) -> LineageRow:
    fitness = row.get("fitness")
    is_finite = fitness is None or (fitness == fitness and abs(fitness) != float("inf"))
    return row if is_finite else {**row, "fitness": None}
