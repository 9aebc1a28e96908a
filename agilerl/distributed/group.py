"""The process group: started by the first agent under a launcher, closed at exit."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agilerl.distributed.failure import start_watch, stop_watch
from agilerl.distributed.ranks import get_local_rank, launched
from agilerl.errors import ConfigError, DistributedError

__all__ = ["close_group", "ensure_group", "group_timeout", "local_device"]

_log = logging.getLogger(__name__)
_started_here = False


def group_timeout() -> datetime.timedelta:
    """How long a collective may wait for a rank: ``AGILERL_GROUP_TIMEOUT_S``, 600 s by default."""
    text = os.environ.get("AGILERL_GROUP_TIMEOUT_S", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"AGILERL_GROUP_TIMEOUT_S must be a positive number of seconds, not {text!r}.")
    return datetime.timedelta(seconds=seconds)


def ensure_group(device: torch.device | str, *, even_alone: bool = False) -> bool:
    """Start the process group where a launcher asks for one and there is none yet.

    Args:
        device: Where models compute: gloo serves CPUs, nccl GPUs.
        even_alone: Start a group of one process too (sharded runtimes need a group).

    Returns:
        Whether there is a group now.
    """
    global _started_here
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return True
    kind = torch.device(device).type
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if not launched():
        if not even_alone:
            return False
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=group_timeout())
    else:
        if kind == "cuda":
            torch.cuda.set_device(local_device(device))
        try:
            dist.init_process_group(backend, timeout=group_timeout())
        except (RuntimeError, ValueError) as problem:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise DistributedError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the process group at {where}: "
                f"{problem}"
            ) from problem
        if dist.get_world_size() > 1:
            _watch_peers()
    _started_here = True
    atexit.register(close_group)
    return True


def close_group() -> None:
    """End the process group if :func:`ensure_group` started it. Called at exit by itself."""
    global _started_here
    if not _started_here:
        return
    _started_here = False
    went_well = stop_watch()
    if went_well and dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


def local_device(device: torch.device | str) -> torch.device:
    """``cuda`` becomes this rank's own GPU; other devices stay as they are."""
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", get_local_rank() if launched() else torch.cuda.current_device())
    return place


def _watch_peers() -> None:
    """Connect to the store a second time: blocking calls of the group must not hold up the watcher."""
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=30),
        )
        start_watch(store, dist.get_rank(), dist.get_world_size())
    except (RuntimeError, ValueError) as problem:
        _log.warning("Failures of other ranks will only be noticed by time-outs: %s", problem)
