"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import socket
import sys
import urllib.parse
from typing import Annotated, Any

import typer

__all__ = [
    "Data",
    "Model",
    "Output",
    "Overwrite",
    "Resume",
    "ShowConfig",
    "TestData",
    "Words",
    "options_of",
    "quiet_libraries",
]

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [section.key=value ...]",
        help="A run description, and settings that win over it. docs/configuration.md lists all settings.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Preset, folder or Hub name (model.name).", show_default=False)
]
Data = Annotated[
    str | None, typer.Option("--data", help="Training rows: file or Hub name (data.train).", show_default=False)
]
TestData = Annotated[str | None, typer.Option("--test-data", help="Held-out rows (data.test).", show_default=False)]
Output = Annotated[str | None, typer.Option("--output", help="Checkpoint folder (output.path).", show_default=False)]
Resume = Annotated[
    str | None, typer.Option("--resume", help="Go on from this checkpoint, with its settings.", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in the output folder.")]
ShowConfig = Annotated[bool, typer.Option("--show-config", help="Show all settings and their origin, and stop.")]


def options_of(
    *,
    model: str | None = None,
    data: str | None = None,
    test_data: str | None = None,
    output: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Named options as settings of a run description."""
    return {
        "model.name": model,
        "data.train": data,
        "data.test": test_data,
        "output.path": output,
        "output.overwrite": True if overwrite else None,
    }


def quiet_libraries() -> None:
    """Keep progress bars and notices of libraries out of the output; their errors stay. Call before importing them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_is_there():
        # Without a network the hub's client tries again for more than a minute before it says so.
        os.environ["HF_HUB_OFFLINE"] = "1"
    if "transformers" in sys.modules:  # it has read the environment already
        sys.modules["transformers"].logging.disable_progress_bar()
    if not sys.warnoptions:
        import warnings

        warnings.formatwarning = lambda message, *_, **__: f"Note: {message}\n"
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)


def _hub_is_there() -> bool:
    """Whether the hub's name is known here; behind a proxy, which looks names up itself, it is taken to be."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
