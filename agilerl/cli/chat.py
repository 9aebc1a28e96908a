"""``agilerl chat``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agilerl.cli.words import quiet_libraries

if TYPE_CHECKING:
    from agilerl.recipes.chat import Conversation

__all__ = ["command"]


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint, adapter, merged model, preset or Hub name.")],
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this, print the answer and stop.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model of an adapter that was moved.", show_default=False)
    ] = None,
    plain: Annotated[
        bool | None, typer.Option("--plain/--template", help="Without or with the chat template.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the most likely answer.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of drawn answers.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda ...")] = "auto",
    quantization: Annotated[
        Literal["none", "int8", "nf4"], typer.Option("--quantization", help="Hold the base in 8 or 4 bits.")
    ] = "none",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> int:
    """Talk to a model: interactively, or once with --message."""
    quiet_libraries()
    from agilerl.models.build import takes_images
    from agilerl.recipes.chat import Conversation, check_temperature
    from agilerl.recipes.device import pick_device
    from agilerl.recipes.open import open_model

    check_temperature(temperature)  # before the model is loaded
    opened = open_model(
        checkpoint,
        base=base,
        device=pick_device(device),
        trust_remote_code=trust_remote_code,
        quantization=quantization,
    )
    conversation = Conversation.like_training(
        checkpoint,
        opened,
        plain=plain,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    if message is not None:
        _answer(conversation, message)
        return 0
    if takes_images(opened.base, trust_remote_code=trust_remote_code) and sys.stdin.isatty():
        sys.stdout.write("The model can read images, but is asked in words alone here.\n")
    return _talk(conversation, checkpoint)


def _talk(conversation: Conversation, name: str) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 - gives the line editor its history

        sys.stdout.write(
            f"{name} ({conversation.opened.kind}). /reset forgets the conversation, /exit or Ctrl-D ends.\n"
        )
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            conversation.reset()
        elif line:
            try:
                _answer(conversation, line)
            except KeyboardInterrupt:
                sys.stdout.write(" (stopped)\n")


def _answer(conversation: Conversation, message: str) -> None:
    for piece in conversation.ask(message):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
