"""``agilerl verify``: is a checkpoint complete, undamaged and on the right base model?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="Checkpoint folder.")],
    base: Annotated[str | None, typer.Option(help="Where the base model is now, if it has moved.")] = None,
) -> None:
    """Check hashes, shapes, finite values and the base model. Exits 0 if all is well and 1 if not."""
    from agilerl.checkpoint import newest_complete
    from agilerl.checkpoint.verify import verify

    report = verify(path, base_model=base)
    for problem in report.problems:
        typer.echo(f"WRONG  {problem}")
    for line in report.checked:
        typer.echo(f"looked at {line}")
    typer.echo(f"base model: {report.base}")
    if report.is_ok:
        typer.echo(f"{path} is a good checkpoint.")
        return
    count = len(report.problems)
    typer.echo(
        f"{path} is NOT a good checkpoint: {count} {'thing is' if count == 1 else 'things are'} wrong.", err=True
    )
    before = newest_complete(path)
    is_other = before is not None and before.resolve() != Path(path).resolve()
    typer.echo(
        f"An earlier one in it is whole, use that: {before}"
        if is_other
        else "Copy these files again, or save it again.",
        err=True,
    )
    raise typer.Exit(1)
