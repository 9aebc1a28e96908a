"""Starts ranks on this machine, without a launcher's own start-up cost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(ranks: int, arguments: list[str], **environment: str) -> list[subprocess.Popen[str]]:
    """One Python process per rank; stdout and stderr are piped together."""
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "AGILERL_GROUP_TIMEOUT_S": "60",
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str]]:
    """(exit code, output) of every rank; ranks that outlive ``timeout`` are killed and counted as failed."""
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            results.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return results
