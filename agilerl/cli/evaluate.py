"""``agilerl evaluate``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from agilerl.cli.words import Data, quiet_libraries

__all__ = ["command"]


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint, adapter, merged model, preset or Hub name.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", help="Settings of data and evaluation.", show_default=False),
    ] = None,
    data: Data = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model of an adapter that was moved.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print nothing but one JSON object.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda ...")] = "auto",
) -> int:
    """Measure held-out loss, perplexity and exact match of a model.

    Without --data: the held-out rows of the run that made the checkpoint. With it: all rows of that file.
    """
    quiet_libraries()
    from agilerl.recipes.device import pick_device
    from agilerl.recipes.evaluate import evaluate_model
    from agilerl.recipes.report import Reporter

    report = Reporter()
    report.console.quiet = as_json
    result = evaluate_model(checkpoint, words or [], data=data, base=base, device=pick_device(device), reporter=report)
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict()) + "\n")
        return 0
    report.measured(checkpoint, result)
    return 0
