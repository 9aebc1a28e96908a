"""Writing checkpoints while training goes on."""

from __future__ import annotations

import os
import sys
import threading

from agilerl.checkpoint.folder import CheckpointFolder
from agilerl.checkpoint.snapshot import LLMCheckpointSnapshot

__all__ = ["BackgroundWriter"]

_NICENESS = 10
"""The writer hashes and copies; at this priority it takes the processor time that training leaves."""


class BackgroundWriter:
    """Writes one snapshot at a time on its own thread.

    An error of the thread is raised by the next :meth:`submit`, :meth:`wait` or :meth:`close`, whichever comes first.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self, snapshot: LLMCheckpointSnapshot, folder: CheckpointFolder, *, step: int, score: float | None = None
    ) -> None:
        """Begin to write ``snapshot`` and return; waits first if another one is still being written.

        The snapshot's memory goes back to its pool when it is on the disk. Call :meth:`wait` before taking the next
        snapshot, so that it can reuse that memory.
        """
        self.wait()

        def work() -> None:
            try:
                if sys.platform == "linux":  # elsewhere the number would mean another process
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
                folder.save(snapshot, step=step, score=score)
            except BaseException as error:
                self._error = error
            finally:
                snapshot.release()

        # A daemon: when the process must leave at once, the checkpoint before this one is complete.
        self._thread = threading.Thread(target=work, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the snapshot is on the disk, and raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish; the writer may be used again."""
        self.wait()
