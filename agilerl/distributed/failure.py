"""When one rank fails, all end within seconds, and each says why.

A rank that dies by an exception leaves its message in the group's store; a watcher thread on every rank looks there,
and looks whether the ranks of its own machine still live. Collectives that break because a peer is gone are reported
with the peer's message; a rank that stays stuck in one is ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Watch", "explain", "report_failure", "start_watch", "stop_watch"]

POLL_S = 0.5
GRACE_S = 8.0
"""Time for a rank to end by itself, with its own traceback, after a peer has failed."""
_log = logging.getLogger(__name__)
_watch: Watch | None = None


class Watch:
    """This rank's view of its peers.

    Args:
        store: A connection to the group's store of its own, so that blocking calls of others do not hold it up.
        rank: This rank.
        world_size: Number of ranks.
        prefix: Start of all keys, different for each (re)start of the job.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str) -> None:
        self.store, self.rank, self.world_size, self.prefix = store, rank, world_size, prefix
        self.message: str | None = None
        self.failed_here = False
        self._stop = threading.Event()
        self._neighbours: dict[int, list[Any]] = {}
        self._previous_hook = sys.excepthook
        store.set(self._key("place", rank), json.dumps([_machine(), os.getpid()]))
        self._thread = threading.Thread(target=self._run, name="agilerl-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, and to report this process's uncaught exceptions."""
        sys.excepthook = self._excepthook
        self._thread.start()

    def stop(self, *, wait_for_peers_s: float = 30.0) -> None:
        """Leave in order. Where this rank holds the store, the others get time to leave first."""
        sys.excepthook = self._previous_hook
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        if self.failed_here or self.message:
            return
        with contextlib.suppress(Exception):  # the store may be gone already; then nobody is left to be told
            self.store.set(self._key("done", self.rank), "1")
            deadline = time.monotonic() + wait_for_peers_s
            while self.rank == 0 and time.monotonic() < deadline and not self._all_left():
                time.sleep(0.05)

    def report(self, message: str, *, rank: int | None = None) -> None:
        """Leave ``message`` for the others; the first one stays."""
        value = json.dumps([self.rank if rank is None else rank, message])
        with contextlib.suppress(Exception):  # without a store there is nobody to tell; the caller still raises
            self.store.compare_set(self._key("failure"), "", value)

    def cause(self, wait_s: float = 0.0) -> str | None:
        """What a peer died of, as a sentence, once known."""
        deadline = time.monotonic() + wait_s
        while self.message is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.message

    def departed(self) -> list[int]:
        """Ranks that have left the group in order."""
        try:
            return [rank for rank in range(self.world_size) if self.store.check([self._key("done", rank)])]
        except Exception:
            return []

    def _all_left(self) -> bool:
        return self.store.check([self._key("failure")]) or len(self.departed()) == self.world_size

    def _key(self, *parts: object) -> str:
        return "/".join(str(part) for part in (self.prefix, *parts))

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._look()
            except Exception as problem:
                if not self._stop.is_set():
                    self.message = f"the group's store, held by rank 0 or the launcher, is gone ({problem})".split(
                        "\n"
                    )[0]
            if self.message is not None and not self.failed_here and not self._stop.wait(GRACE_S):
                sys.stderr.write(f"[rank {self.rank}] stopped: {self.message}\n")
                sys.stderr.flush()
                os._exit(1)
            if self.failed_here:
                return

    def _look(self) -> None:
        if self.store.check([self._key("failure")]):
            rank, message = json.loads(self.store.get(self._key("failure")))
            if rank != self.rank:
                self.message = f"rank {rank} failed: {message}"
            return
        for rank in range(self.world_size):
            if rank == self.rank or self.store.check([self._key("done", rank)]):
                continue
            if rank not in self._neighbours:
                if not self.store.check([self._key("place", rank)]):
                    continue
                self._neighbours[rank] = json.loads(self.store.get(self._key("place", rank)))
            machine, pid = self._neighbours[rank]
            gone = machine is not None and machine == _machine() and not _alive(pid)
            if gone and not self.store.check([self._key("done", rank)]):
                self.report("its process ended without a message (killed, or out of memory)", rank=rank)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = self.cause(wait_s=3.0) if isinstance(error, RuntimeError) else self.message
        if cause is None:
            self.failed_here = True
            self.report(f"{kind.__name__}: {error}")
        self._previous_hook(kind, error, trace)
        if cause is not None:
            sys.stderr.write(f"[rank {self.rank}] stopped: {cause}\n")
        sys.stderr.flush()


def start_watch(store: Any, rank: int, world_size: int) -> None:
    """Watch the peers of the process group that has just been started."""
    global _watch
    _watch = Watch(store, rank, world_size, f"agilerl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    _watch.start()


def stop_watch() -> bool:
    """Stop watching; whether all went well."""
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return True
    watch.stop()
    return not watch.failed_here and watch.message is None


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that this process is about to end because of ``error``.

    Uncaught exceptions are reported by themselves; call this where an exception is caught and the process then exits (a
    command line that prints one sentence). Does nothing for a single process.
    """
    if _watch is not None and _watch.message is None:
        _watch.failed_here = True
        _watch.report(f"{type(error).__name__}: {error}")


def explain(problem: BaseException) -> str:
    """A sentence about a collective that broke, with the peer's message where there is one."""
    if _watch is None:
        return f"a collective operation failed: {problem}"
    if cause := _watch.cause(wait_s=3.0):
        return cause
    if early := [rank for rank in _watch.departed() if rank != _watch.rank]:
        return f"rank {early[0]} left the group while this rank still had work"
    return f"a collective operation failed: {problem}"


def _machine() -> str | None:
    """Identity of this machine's process table; ``None`` where it cannot be told."""
    try:
        return f"{os.uname().nodename} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} " + str(
            Path("/proc/self/ns/pid").readlink()
        )
    except (OSError, AttributeError):
        return None


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
