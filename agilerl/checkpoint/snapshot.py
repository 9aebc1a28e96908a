"""A checkpoint copied to host memory, so that training may go on while it is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from agilerl.checkpoint.content import CheckpointContent
from agilerl.checkpoint.plain import plain
from agilerl.checkpoint.tensors import same_memory
from agilerl.checkpoint.tokenizer import tokenizer_files
from agilerl.checkpoint.write import write_checkpoint

__all__ = ["HostBuffers", "LLMCheckpointSnapshot"]


class HostBuffers:
    """Host tensors that snapshots borrow and give back; pinned where a CUDA device is the source.

    Fresh memory costs more than the copy into it (the system clears every page first), so a training loop keeps one of
    these and its second save is cheap.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and type, from the pool where there is one."""
        free = self._free.get(self._key(like))
        if free:
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def give_back(self, tensors: list[Tensor]) -> None:
        """Offer tensors for the next snapshot."""
        for tensor in tensors:
            self._free.setdefault(self._key(tensor), []).append(tensor)

    def drop(self) -> None:
        """Free the pool."""
        self._free.clear()

    @staticmethod
    def _key(tensor: Tensor) -> tuple[Any, ...]:
        return (tuple(tensor.shape), tensor.dtype)


class LLMCheckpointSnapshot:
    """Host copy of a checkpoint; later training does not change it, and ``write`` may run on another thread."""

    def __init__(self, content: CheckpointContent | None, buffers: HostBuffers | None = None) -> None:
        self.content = content
        self.members: list[CheckpointContent] = []
        self._buffers = buffers
        self._borrowed: list[Tensor] = []

    @classmethod
    def of(
        cls,
        content: CheckpointContent | None,
        buffers: HostBuffers | None = None,
        *,
        members: Sequence[CheckpointContent] = (),
    ) -> LLMCheckpointSnapshot:
        """Copy all tensors of ``content``; None (off the main process) gives an empty snapshot.

        Args:
            content: What the agent captured; tied tensors stay tied in the copy.
            buffers: Pool to borrow host memory from; :meth:`release` gives it back.
            members: Agents of a population, written with it under ``population/<k>/``.
        """
        snapshot = cls(None, buffers)
        if content is None:
            return snapshot
        memo: dict[tuple[Any, ...], Tensor] = {}
        snapshot.content, *snapshot.members = [snapshot._copy_content(one, memo) for one in (content, *members)]
        if any(tensor.is_pinned() for tensor in snapshot._borrowed):
            torch.cuda.synchronize()
        return snapshot

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the checkpoint to ``path``, replacing what was there in one step; an empty snapshot writes nothing."""
        if self.content is not None:
            write_checkpoint(self.content, path, members=self.members)

    def release(self) -> None:
        """Give borrowed memory back; the snapshot is empty afterwards."""
        self.content, self.members = None, []
        if self._buffers is not None:
            self._buffers.give_back(self._borrowed)
        self._borrowed = []

    def _copy_content(self, content: CheckpointContent, memo: dict[tuple[Any, ...], Tensor]) -> CheckpointContent:
        return CheckpointContent(
            **{f.name: self._copy(getattr(content, f.name), memo, f.name) for f in fields(content)}
        )

    def _copy(self, value: Any, memo: dict[tuple[Any, ...], Tensor], where: str) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), memo)
        if where == "tokenizer":
            return None if value is None else tokenizer_files(value)
        if hasattr(value, "__dataclass_fields__"):
            copied = {f.name: self._copy(getattr(value, f.name), memo, f"{where}.{f.name}") for f in fields(value)}
            return replace(value, **copied)
        if isinstance(value, dict):
            return {key: self._copy(item, memo, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self._copy(item, memo, where) for item in value]
        if isinstance(value, tuple):
            return tuple(self._copy(item, memo, where) for item in value)
        return plain(value, where)

    def _copy_tensor(self, tensor: Tensor, memo: dict[tuple[Any, ...], Tensor]) -> Tensor:
        key = same_memory(tensor)
        if key not in memo:
            host = self._buffers.take(tensor) if self._buffers is not None else torch.empty_like(tensor, device="cpu")
            host.copy_(tensor, non_blocking=host.is_pinned())
            self._borrowed.append(host)
            memo[key] = host
        return memo[key]
