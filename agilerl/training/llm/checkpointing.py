"""When a run saves, and what: the best measured agent at the folder's root, every member of a population below it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agilerl.checkpoint import (
    BackgroundWriter,
    CheckpointContent,
    CheckpointFolder,
    HostBuffers,
    LLMCheckpointSnapshot,
    existing_checkpoint,
)
from agilerl.training.llm.options import Options
from agilerl.training.llm.trainee import Trainee

__all__ = ["Keeper", "fittest"]

_logger = logging.getLogger(__name__)


def fittest(trainees: Sequence[Trainee]) -> Trainee:
    """Return the member with the best last fitness; NaN never wins, the earlier of equals does."""
    return max(trainees, key=lambda one: one.fitness if one.fitness == one.fitness else float("-inf"))


class Keeper:
    """Saves a run. Every rank takes part in gathering weights, the main one writes.

    Args:
        options: Folders, steps and retention.
        is_main: Whether this rank writes.
    """

    def __init__(self, options: Options, *, is_main: bool) -> None:
        self._options = options
        self._is_main = is_main
        self._buffers = HostBuffers()
        self._elite: CheckpointContent | None = None
        self._has_elite = False  # apart from the content, which only the main rank has: all must gather, or none
        self._elite_fitness: float | None = None
        self._folder: CheckpointFolder | None = None
        self._writer: BackgroundWriter | None = None
        self.saved_rows = 0
        """Rows of the furthest member at the last save."""
        if options.folder is not None and is_main:
            self._folder = CheckpointFolder(
                options.folder, options.keep_last, options.keep_best, on_error=options.on_save_error
            )
            self._writer = BackgroundWriter() if options.async_save else None

    def start(self, resumed: Path | None) -> None:
        """Say what becomes of checkpoints that are in the folder already: this run's own, or replaced by its first.

        Args:
            resumed: The checkpoint that the run goes on from, wherever it lies.
        """
        if self._folder is None:
            return
        if resumed is not None:
            self._folder.continue_run(resumed)
        elif found := existing_checkpoint(self._folder.path):
            _logger.warning(
                "%s holds %s; the first save replaces it. resume=True goes on from it.", self._folder.path, found
            )

    def is_due(self, trainees: Sequence[Trainee]) -> bool:
        """Return whether the furthest member has passed a multiple of ``checkpoint_steps`` since the last save."""
        steps = self._options.checkpoint_steps
        return (
            self._options.folder is not None
            and steps is not None
            and _furthest(trainees) // steps > self.saved_rows // steps
        )

    def hold_elite(self, trainees: Sequence[Trainee]) -> None:
        """Keep a host copy of the best member as it was measured, before selection and mutation move on.

        It becomes the root of the checkpoint that follows.
        """
        best = fittest(trainees)
        content = self._capture(best)
        self._elite, self._elite_fitness = LLMCheckpointSnapshot.of(content).content, best.fitness
        self._has_elite = True

    def save(self, trainees: Sequence[Trainee], training: dict[str, Any]) -> None:
        """Save the run as it is now.

        Args:
            trainees: All members.
            training: State of the loop.
        """
        self.saved_rows = _furthest(trainees)
        if self._options.folder is None:
            return
        best = fittest(trainees)
        several = len(trainees) > 1
        members = [self._capture(trainee) for trainee in trainees] if several else []
        root = self._elite if self._has_elite else self._capture(best)
        score = best.fitness if self._elite_fitness is None else self._elite_fitness
        self._elite = self._elite_fitness = None
        self._has_elite = False
        if self._folder is None or root is None:
            return
        root.training = training
        kept = [member for member in members if member is not None]
        score = score if abs(score) < float("inf") else None  # NaN and "never measured" are no scores
        if self._writer is None:
            self._folder.save(root, members=kept, step=self.saved_rows, score=score)
        else:
            self._writer.wait()  # before the copy, which then reuses the memory of the last one
            snapshot = LLMCheckpointSnapshot.of(root, self._buffers, members=kept)
            self._writer.submit(snapshot, self._folder, step=self.saved_rows, score=score)

    def save_elite(self, trainees: Sequence[Trainee]) -> None:
        """Write the best member alone to the elite's folder, if one was asked for."""
        if self._options.elite_folder is not None and (content := self._capture(fittest(trainees))) is not None:
            LLMCheckpointSnapshot(content).write(self._options.elite_folder)

    def close(self) -> None:
        """Wait until everything is on the disk; an error of the background writer is raised here at the latest."""
        if self._writer is not None:
            self._writer.close()

    def _capture(self, trainee: Trainee) -> CheckpointContent | None:
        content = trainee.agent._capture(self._options.lora_only, self._options.save_optimizer)
        return content if self._is_main else None


def _furthest(trainees: Sequence[Trainee]) -> int:
    return max(trainee.rows for trainee in trainees)
