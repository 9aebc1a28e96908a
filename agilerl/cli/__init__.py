"""The command line. One file a command; a command's file, and torch with it, is imported only when that command runs.

A command's file has a function ``command`` with typer annotations whose docstring is its help, and may have a dict
``CONTEXT_SETTINGS`` for typer (``agilerl launch`` passes unknown options on with it). Add a file and a line to
:data:`COMMANDS`, and the command exists. Mistakes of the user are raised as one of :mod:`agilerl.errors`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from agilerl import __version__
from agilerl.errors import AgileRLError, ConfigError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMMANDS", "EXIT_USER_ERROR", "main"]

COMMANDS: dict[str, str] = {
    "sft": "Fine-tune a model on prompts and answers",
    "dpo": "Align a fine-tuned model with chosen and rejected answers",
    "chat": "Talk to a checkpoint",
    "evaluate": "Measure held-out loss, perplexity and exact match of a checkpoint",
    "merge": "Fold an adapter into its base model and save an ordinary model",
    "inspect": "Show what a data set trains, token by token",
    "verify": "Check that a checkpoint is complete and undamaged",
    "plan": "Estimate memory and step time of a run before starting it",
    "launch": "Run a command on several processes (a thin call of torchrun)",
}
"""Command name -> one line for ``agilerl --help``. The code of command ``x`` is ``agilerl/cli/x.py``."""

EXIT_USER_ERROR = 2
"""Exit code for what the user can put right: settings, data, files, models, missing packages."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``agilerl`` and return its exit code.

    0: done. 1: another process failed, or a check did not pass. 2: a mistake of the user, told in a sentence.
    130 or 143: stopped by Ctrl-C or SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            _say(_overview())
            return 0
        if words[0] in ("-V", "--version", "version"):
            _say(f"agilerl {__version__}")
            return 0
        return _run(_find(words[0]), words)
    except DistributedError as error:
        return _fail(error, 1)
    except AgileRLError as error:
        return _fail(error, EXIT_USER_ERROR)
    except KeyboardInterrupt as error:
        _tell_peers(error)
        sys.stderr.write("\nStopped.\n")
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(command: Callable[..., object], words: list[str]) -> int:
    import typer

    module = sys.modules[command.__module__]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    outcome: list[object] = []

    @functools.wraps(command)
    def keep_outcome(*args: object, **kwargs: object) -> None:
        outcome.append(command(*args, **kwargs))

    app.command(context_settings=getattr(module, "CONTEXT_SETTINGS", None))(keep_outcome)
    try:
        app(words[1:], prog_name=f"agilerl {words[0]}")
    except SystemExit as end:
        if not outcome:  # --help, a wrong option, or a signal that ended the process
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return outcome[0] if isinstance(outcome[0], int) else 0


def _find(name: str) -> Callable[..., object]:
    """The function of command ``name``."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"There is no command '{name}'.{hint} Commands: {', '.join(COMMANDS)}.")
    return importlib.import_module(f"agilerl.cli.{name}").command


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["Usage: agilerl COMMAND [...]", "", "Fine-tuning of language models.", "", "Commands:"]
    lines += [f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()]
    lines += [
        "",
        "'agilerl COMMAND --help' tells more. 'agilerl sft' alone trains a small model on a bundled data set.",
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _tell_peers(error: BaseException) -> None:
    """Let the other processes of a run say why this one ends."""
    if "torch" in sys.modules and "agilerl.distributed" in sys.modules:
        sys.modules["agilerl.distributed"].report_failure(error)


def _fail(error: Exception, code: int) -> int:
    _tell_peers(error)
    sys.stderr.write(f"Error: {error}\n")
    return code


def script() -> NoReturn:
    """Entry point of ``python -m agilerl``."""
    sys.exit(main())
