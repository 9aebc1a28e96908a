"""What a run tells a person: where its settings came from, what its data is, what it learned, and what to type next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from agilerl.config import LoadedConfig
from agilerl.recipes.describe import Description
from agilerl.recipes.evaluation import Answer, Evaluation

__all__ = ["Reporter"]


class Reporter:
    """Writes to standard output; silent on all ranks but the first.

    Args:
        console: Where to; default: standard output.
        is_main: Whether this process speaks.
    """

    def __init__(self, console: Console | None = None, *, is_main: bool = True) -> None:
        self.console = console or Console(highlight=False)
        self.console.quiet = self.console.quiet or not is_main

    def say(self, text: str = "") -> None:
        """One line, as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def settings(self, loaded: LoadedConfig, *, everything: bool = False) -> None:
        """Each setting with its value and where it came from; without ``everything``, those that were given."""
        rows = loaded.rows(only_given=not everything)
        width = max((len(path) for path, _, _ in rows), default=0)
        values = max((len(value) for _, value, _ in rows), default=0)
        for path, value, source in rows:
            self.say(f"  {path:<{width}}  {value:<{values}}  ({source})")

    def opening(self, kind: str, folder: Path, description: Description) -> None:
        """The first lines of a run."""
        verb = "goes on in" if description.resume is not None else "into"
        self.say(f"{kind} of {description.loaded.config.model.name} {verb} {folder}")
        if description.resume is None:
            self.settings(description.loaded)
        for name, old, new in description.changes:
            self.say(f"  {name}: {old} -> {new}")

    def data(self, env: Any) -> None:
        """Rows in and kept, what happened to the others, and how much is trained, for each split."""
        for split in ("train", "test"):
            summary = env.summary(split)
            report = summary.report
            lost = [
                f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(report.dropped.items()) if count
            ]
            lost += [f"{report.cut:,} cut"] if report.cut else []
            lost += [
                f"{count:,} with {name.replace('_', ' ')}"
                for name, count in sorted(report.notes.items())
                if count and name != "cut"
            ]
            lost += [f"{summary.num_duplicates:,} duplicates"] if summary.num_duplicates else []
            middle, most = summary.percentiles.get(50, 0), summary.longest[1]
            self.say(
                f"{split:<8}{summary.rows:,} of {report.rows_in:,} rows ({report.format or 'prompt_response'})"
                f"{': ' if lost else ''}{', '.join(lost)}; {summary.trained_tokens:,} of {summary.tokens:,} tokens trained; "
                f"median {middle:,}, longest {most:,} tokens"
            )
            for notice in report.notices:
                self.say(f"        {notice}")

    def agent(self, agent: Any) -> None:
        """What is trained, and on what."""
        from agilerl.models.quantization import num_parameters

        trained = sum(parameter.numel() for parameter in agent.actor.parameters() if parameter.requires_grad)
        total = num_parameters(agent.actor)
        path, _ = agent.packing
        self.say(
            f"model   {trained:,} of {total:,} parameters are trained ({trained / max(total, 1):.2%}), "
            f"on {agent.device}, rows {path}"
        )

    def answering(self, label: str) -> _Answering:
        """Progress of the answers of an evaluation."""
        return _Answering(self.console, label)

    def measured(self, label: str, result: Evaluation) -> None:
        """One line of numbers."""
        exact = "" if result.exact_match is None else f"  exact match {result.exact_match:.1%}"
        self.say(f"{label}  held-out loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{exact}")

    def comparison(self, before: Evaluation, after: Evaluation, samples: int) -> None:
        """Numbers before and after, then some answers side by side."""
        table = Table(title="Held-out rows", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("", "before", "after"):
            table.add_column(column, justify="left" if not column else "right")
        table.add_row("loss", f"{before.loss:.4f}", f"{after.loss:.4f}")
        table.add_row("perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}")
        if before.exact_match is not None and after.exact_match is not None:
            table.add_row("exact match", f"{before.exact_match:.1%}", f"{after.exact_match:.1%}")
        self.say()
        self.console.print(table)
        self.answers(before.answers, after.answers, samples)

    def answers(self, before: list[Answer], after: list[Answer], samples: int) -> None:
        """Some answers side by side, spread evenly over the rows: neighbours are often of one kind."""
        pairs = list(zip(before, after, strict=False))
        for old, new in pairs[:: max(1, len(pairs) // max(1, samples))][:samples]:
            self.say()
            self.say(f"  asked   {_line(new.prompt)}")
            self.say(f"  wanted  {_line(new.expected)}")
            self.say(f"  before  {_line(old.given)}")
            self.say(f"  after   {_line(new.given)}{'' if new.is_exact else '   (differs)'}")

    def lineage(self, folder: Path) -> None:
        """An evolution's history: who came from whom, with which change and which fitness."""
        from agilerl.training.llm import lineage_table, read_lineage

        self.say()
        self.console.print(lineage_table(read_lineage(folder)))

    def next_command(self, folder: Path) -> None:
        """Where the result is and what to type now."""
        self.say()
        self.say(f"Saved to {folder}")
        self.say(f"Talk to it:  agilerl chat {shlex.quote(str(folder))}")


class _Answering:
    """A short-lived progress bar; a callable for :func:`agilerl.recipes.evaluation.evaluate`."""

    def __init__(self, console: Console, label: str) -> None:
        self._progress = Progress(
            TextColumn(label),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("answers"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=None)

    def __enter__(self) -> _Answering:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)


def _line(text: str, limit: int = 160) -> str:
    """A text on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."
