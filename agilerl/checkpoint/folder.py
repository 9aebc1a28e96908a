"""The folder of a training run: its newest checkpoint at the root, a limited history below it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agilerl.checkpoint import layout
from agilerl.checkpoint.content import CheckpointContent
from agilerl.checkpoint.files import output_errors, sync_folder
from agilerl.checkpoint.manifest import read_manifest
from agilerl.checkpoint.snapshot import LLMCheckpointSnapshot
from agilerl.checkpoint.tokenizer import MARKER as TOKENIZER_MARKER
from agilerl.checkpoint.write import remove_version, store, writer_lock
from agilerl.errors import CheckpointError, ConfigError, OutputError

__all__ = ["CheckpointFolder", "check_writable", "existing_checkpoint"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    number: int
    run: int
    step: int | None
    score: float | None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Make sure, before hours of training, that a checkpoint can be written to ``path``.

    Raises:
        OutputError: The folder cannot be made or written, or something foreign is in the way.
    """
    root = Path(path)
    names = (layout.ATTRIBUTES, layout.MANIFEST, "actor", layout.ADAPTER_CONFIG, layout.ADAPTER_TENSORS)
    names += (layout.TRAINING, "tokenizer.json", TOKENIZER_MARKER, "chat_template.jinja")
    with output_errors(root, "Nothing was trained yet."):
        versions = root / layout.VERSIONS
        versions.mkdir(parents=True, exist_ok=True)
        trial = versions / f".trial-{os.getpid()}"
        trial.unlink(missing_ok=True)  # in containers a killed run and the next one often have the same number
        trial.symlink_to("nowhere")
        trial.unlink()
        trial.write_bytes(b"x" * 4096)
        trial.unlink()
    layout.check_free(root, names)
    best, history = root / layout.BEST, root / layout.HISTORY
    in_the_way = [best] * (best.exists() and not best.is_symlink()) + [history] * history.is_file()
    if in_the_way:
        raise OutputError(f"{in_the_way[0]} is in the way of checkpoints; move it or name another folder.")


def existing_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Describe the checkpoint that is already at ``path`` in a few words; None where there is none."""
    root = Path(path)
    if not (root / layout.ATTRIBUTES).exists():
        return None
    try:
        info = read_manifest(layout.payload_of(root)).info
    except CheckpointError:
        return "a checkpoint that is damaged"
    step = info.get("step")
    return f"a checkpoint of {info.get('algorithm')}" + (f" after {step} rows" if step is not None else "")


class CheckpointFolder:
    """Saves a run's checkpoints to one folder and keeps the newest and the best of them.

    The folder is always the newest complete checkpoint. ``best`` and ``history/step-...`` below it are checkpoints, too.
    Files that no checkpoint owns are never touched. A run that starts afresh in the folder of an earlier one replaces it
    with its first save; :meth:`continue_run` keeps the earlier checkpoints as this run's own instead.

    Args:
        path: The folder; checked for writing right away.
        keep_last: Newest checkpoints kept, the one at the root included.
        keep_best: Best checkpoints kept beside them, by score.
        on_error: What a failing save does: ``"raise"``, or ``"warn"`` and let training go on.

    Raises:
        OutputError: The folder cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int = 2,
        keep_best: int = 1,
        *,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(f"keep_last is {keep_last} and keep_best {keep_best}; at least 1 and 0 are needed.")
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error is {on_error!r}; it must be 'raise' or 'warn'.")
        self.path = Path(path)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._on_error = on_error
        check_writable(self.path)
        self._run = max((kept.run for kept in self._known()), default=0) + 1

    def continue_run(self, newest: Path | None = None) -> None:
        """Go on with the run whose checkpoints are in the folder.

        Args:
            newest: What :func:`newest_complete` found here. A kept version becomes current: the process may have been
                killed between completing it and showing it at the root, or what the root shows is damaged.

        Raises:
            OutputError: The folder cannot be written.
        """
        self._run = max((kept.run for kept in self._known()), default=self._run)
        if newest is None or newest not in (self.path, *(self.path / layout.VERSIONS).iterdir()):
            return
        with writer_lock(self.path):
            number = layout.current_version(self.path)
            if newest != self.path:
                number = int(newest.name)
                layout.publish(
                    self.path, number, layout.check_free(self.path, [entry.name for entry in newest.iterdir()])
                )
            if number is not None:
                self._tidy(number)

    def save(
        self,
        content: CheckpointContent | LLMCheckpointSnapshot,
        *,
        members: Sequence[CheckpointContent] = (),
        step: int,
        score: float | None = None,
    ) -> Path | None:
        """Write a checkpoint, make it current, and drop what need not be kept.

        Args:
            content: The agent at the root, or a snapshot with its members.
            members: Agents of a population, for ``population/<k>/``.
            step: Rows trained so far.
            score: Fitness, higher is better; None where it was not measured.

        Returns:
            The folder, or None where saving failed and ``on_error`` is ``"warn"``.

        Raises:
            OutputError: It cannot be written; the one before is unharmed.
        """
        if isinstance(content, LLMCheckpointSnapshot):
            if content.content is None:
                return None
            members, content = content.members, content.content
        try:
            with writer_lock(self.path):
                info = {"run": self._run, "step": step, "score": score}
                number = store(content, self.path, members=members, info=info)
                self._tidy(number)
        except OutputError as error:
            if self._on_error == "raise":
                raise
            log.warning("%s Training goes on.", error)
            return None
        return self.path

    def _known(self) -> list[_Kept]:
        """Payloads with a readable manifest, oldest first."""
        known = []
        for number in layout.version_numbers(self.path):
            try:
                info = read_manifest(self.path / layout.VERSIONS / str(number)).info
            except CheckpointError:
                continue
            known.append(_Kept(number, int(info.get("run") or 0), info.get("step"), info.get("score")))
        return known

    def _tidy(self, current: int) -> None:
        known = self._known()
        # One checkpoint a step: the final save may repeat the last periodic one.
        mine = {kept.step: kept for kept in known if kept.run == self._run}
        newest = sorted(mine.values(), key=lambda kept: kept.number)[-self._keep_last :]
        scored = [(kept.score, kept.number, kept) for kept in mine.values() if kept.score is not None]
        best = [kept for _, _, kept in sorted(scored, key=lambda one: one[:2], reverse=True)]
        wanted = {kept.number: kept for kept in [*newest, *best[: self._keep_best]]}
        self._link(wanted, best[0] if best and self._keep_best else None)
        for kept in known:
            if kept.number not in wanted and kept.number != current:
                remove_version(self.path, kept.number)

    def _link(self, wanted: dict[int, _Kept], best: _Kept | None) -> None:
        history = self.path / layout.HISTORY
        history.mkdir(exist_ok=True)
        names = {f"step-{kept.step:08d}": number for number, kept in wanted.items() if kept.step is not None}
        for name, number in names.items():
            layout.set_link(history / name, f"../{layout.VERSIONS}/{number}")
        for link in history.iterdir():
            is_ours = link.is_symlink() and str(link.readlink()).startswith(f"../{layout.VERSIONS}/")
            if is_ours and link.name not in names:
                link.unlink()
        sync_folder(history)
        link = self.path / layout.BEST
        if best is not None:
            layout.set_link(link, f"{layout.VERSIONS}/{best.number}")
        elif link.is_symlink():
            link.unlink()
