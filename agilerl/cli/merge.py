"""``agilerl merge``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agilerl.cli.words import quiet_libraries

__all__ = ["command"]


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint or adapter folder.")],
    output: Annotated[str, typer.Argument(help="Folder of the merged model.")],
    base: Annotated[
        str | None, typer.Option("--base", help="Base model of an adapter that was moved.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Type of the weights; as stored without it.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a merged model in the output folder.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> int:
    """Fold an adapter into its base model and save an ordinary model with its tokenizer."""
    quiet_libraries()
    from agilerl.recipes.merging import merge_checkpoint

    folder, error = merge_checkpoint(
        checkpoint, output, base=base, dtype=dtype, overwrite=overwrite, trust_remote_code=trust_remote_code
    )
    sys.stdout.write(f"Merged into {folder}; logits differ by at most {error:.1e} (relative) from the adapter's.\n")
    sys.stdout.write(f"Talk to it:  agilerl chat {folder}\n")
    return 0
