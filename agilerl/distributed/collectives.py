"""Exchange of plain values between ranks; the part that both runtimes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from agilerl.distributed.failure import explain
from agilerl.distributed.group import ensure_group, local_device
from agilerl.errors import AgileRLError, DistributedError

__all__ = ["Collectives", "told"]


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around collectives: one that breaks because a rank is gone becomes a sentence about that rank."""
    try:
        yield
    except RuntimeError as problem:
        if isinstance(problem, AgileRLError) or not _is_about_the_group(problem):
            raise
        raise DistributedError(explain(problem)) from problem


def _is_about_the_group(problem: RuntimeError) -> bool:
    """Broken collectives have a class of their own with nccl, but not always with gloo."""
    words = str(problem).lower()
    marks = ("gloo", "nccl", "connection closed", "connection reset", "process group", "c10d", "socket")
    return isinstance(problem, dist.DistError) or any(mark in words for mark in marks)


class Collectives:
    """Sums, maxima and broadcasts over the ranks; trivial for one process."""

    def __init__(self, device: torch.device | str, *, even_alone: bool = False) -> None:
        has_group = ensure_group(device, even_alone=even_alone)
        self.device = local_device(device)
        self.rank = dist.get_rank() if has_group else 0
        self.world_size = dist.get_world_size() if has_group else 1
        self.dp_rank, self.dp_size = self.rank, self.world_size
        self.is_main = self.rank == 0
        self.dp_group: dist.ProcessGroup | None = None
        """``None`` means all ranks."""

    @property
    def _wire(self) -> torch.device:
        """Where small messages travel: the host, unless the group speaks nccl only."""
        backend = dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
        return torch.device("cpu") if "gloo" in str(backend) or "mpi" in str(backend) else self.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over data-parallel ranks, in float64."""
        if self.dp_size == 1:
            return [float(value) for value in values]
        with told():
            message = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self._wire)
            dist.all_reduce(message, group=self.dp_group)
            return message.tolist()

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks; NaN wins."""
        if self.world_size == 1:
            return [float(value) for value in values]
        with told():
            message = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self._wire)
            gathered = [torch.empty_like(message) for _ in range(self.world_size)]
            dist.all_gather(gathered, message)
            return torch.stack(gathered).amax(dim=0).tolist()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return self.max([float(flag)])[0] > 0

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """``source``'s value on every rank (plain objects)."""
        if self.world_size == 1:
            return value
        with told():
            box = [value if self.rank == source else None]
            dist.broadcast_object_list(box, src=source, device=self._wire)
            return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.max([0.0])
