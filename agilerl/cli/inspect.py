"""``agilerl inspect``: what a data set trains, token by token, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agilerl.cli.words import Data, Model, Words, options_of, quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from agilerl.llm_envs.inspection import Inspection

__all__ = ["command"]

Rows = Annotated[int, typer.Option("--rows", min=0, help="How many rows to show.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page to this file.", show_default=False)]
Kind = Annotated[
    Literal["sft", "preference"] | None,
    typer.Option("--objective", help="Default: preference for data.format=preference, else sft.", show_default=False),
]


def command(
    words: Words = None,
    model: Model = None,
    data: Data = None,
    rows: Rows = 3,
    as_json: Json = False,
    page: Html = None,
    objective: Kind = None,
) -> None:
    """Show rows as the model sees them, trained tokens coloured, and the whole set in numbers.

    Bad rows are left out here and named, each with its number; a training run would stop at them.
    """
    quiet_libraries()
    from agilerl.llm_envs.inspection import inspect_data
    from agilerl.models import load_tokenizer
    from agilerl.recipes.describe import describe
    from agilerl.recipes.images import processor_for
    from agilerl.recipes.setup import bundled, model_limits

    config = describe(words or (), options=options_of(model=model, data=data)).loaded.config
    kind = objective or ("preference" if config.data.format == "preference" else "sft")
    section = config.data if config.data.train is not None else bundled(config.data, kind)
    max_positions, stop_ids = model_limits(config.model.name, config.model.trust_remote_code)
    found = inspect_data(
        section,
        load_tokenizer(config.model.name),
        objective=kind,
        rows=rows,
        max_positions=max_positions,
        stop_ids=stop_ids,
        processor=processor_for(config, kind),
    )
    if page is not None:
        from agilerl.data.inspect import as_html, summary_lines

        page.write_text(as_html(found.views, summary_lines(found.summary)), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.as_dict(), allow_nan=False))
        return
    from rich.console import Console

    size = config.dpo.batch_size if kind == "preference" else config.sft.batch_size
    _show(Console(highlight=False), found, size, config.training.epochs or 1)
    if page is not None:
        typer.echo(f"page written to {page}")


def _show(console: Console, found: Inspection, batch_size: int, epochs: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from agilerl.data.inspect import summary_lines

    for view in found.views:
        side = f", {view.side}" if view.side else ""
        console.rule(f"row {view.row}{side}: {view.num_tokens} tokens, {view.num_trained} trained")
        text = Text()
        for piece in view.pieces:
            for place, token in enumerate(piece.tokens):
                text.append(
                    token, style=("black on green" if place % 2 else "black on bright_green") if piece.weight else "dim"
                )
        console.print(text, soft_wrap=True)
        for piece in view.pieces:
            line = Text(f"  {len(piece.tokens):>5} tokens  ", style="bold green" if piece.weight else "dim")
            console.print(line.append(piece.rule))
    console.rule("the whole set")
    table = Table.grid(padding=(0, 2))
    for name, value in summary_lines(found.summary, batch_size=batch_size, epochs=epochs):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    for low, high, count in found.summary.histogram:
        bar = "#" * round(40 * count / max(part[2] for part in found.summary.histogram))
        console.print(Text(f"  {low:>6}-{high:<6} {count:>8}  {bar}"))
    report = found.summary.report
    for title, faults in (
        ("cannot be used", report.faults),
        ("left out", report.left_out),
        ("worth a look", [*report.findings, *found.summary.duplicates]),
    ):
        for fault in faults:
            console.print(
                Text(f"{title}: {report.describe(fault.row)} {fault.message} ({fault.reason})"), soft_wrap=True
            )
    for finding in found.findings:
        line = f"a run would be refused: {finding.sentence} (data.allow=[{finding.name}] waives this)"
        console.print(Text(line, style="bold red"), soft_wrap=True)
