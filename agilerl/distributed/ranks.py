"""Who am I among the processes? Answers come from the process group, else from the launcher's environment."""

from __future__ import annotations

import os

__all__ = [
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "launched",
]


def launched() -> bool:
    """Whether a launcher such as ``torchrun`` told this process its place."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def get_rank() -> int:
    """This process's number, 0 when alone."""
    return _ask("get_rank", "RANK", 0)


def get_world_size() -> int:
    """Number of processes, 1 when alone."""
    return _ask("get_world_size", "WORLD_SIZE", 1)


def get_local_rank() -> int:
    """This process's number on its machine; also the index of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if launched() and "LOCAL_RANK" in os.environ else 0


def get_local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size())) if launched() else 1


def is_main_process() -> bool:
    """Whether this process writes files and logs."""
    return get_rank() == 0


def is_distributed() -> bool:
    """Whether there is more than one process."""
    return get_world_size() > 1


def _ask(question: str, variable: str, alone: int) -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return getattr(dist, question)()
    return int(os.environ[variable]) if launched() else alone
