"""The part of a tensor that this rank holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["is_sharded", "local", "local_box", "mesh_names", "place", "replicas", "whole_on_cpu", "with_local"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is spread over ranks."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor.

    Matrix splits (tensor parallel) are applied before strided shards, which is the order in which FSDP2 shards what
    tensor parallelism has split already.
    """
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in sizes)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(slice(0, 0) for _ in sizes)
    order = sorted(range(len(coordinate)), key=lambda d: _is_strided(tensor.placements[d]))
    for dim in order:
        axis = getattr(tensor.placements[dim], "dim", None)
        if axis is None:
            continue
        step = math.ceil(sizes[axis] / tensor.device_mesh.size(dim))
        skipped = min(sizes[axis], coordinate[dim] * step)
        starts[axis] += skipped
        sizes[axis] = min(step, sizes[axis] - skipped)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def mesh_names(tensor: Tensor) -> tuple[str, ...]:
    """Names of the mesh dimensions that ``tensor`` is spread over; empty where it is whole."""
    return (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()


def with_local(part: Tensor, like: Tensor) -> Tensor:
    """``part`` as this rank's share of a tensor laid out like ``like``."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def place(whole: Tensor, like: Tensor) -> Tensor:
    """The share of ``whole``, which every rank has, that this rank keeps; device, dtype and layout of ``like``."""
    target = local(like)
    part = whole.detach()[local_box(like)] if whole.dim() else whole.detach()
    return with_local(part.to(target.device, target.dtype, copy=True).contiguous(), like)


def whole_on_cpu(tensor: Tensor, device: torch.device, wanted: bool) -> Tensor | None:
    """Gather ``tensor`` (collective); the whole on the CPU where ``wanted``, ``None`` elsewhere."""
    if isinstance(tensor, DTensor):
        if local(tensor).device.type != device.type:  # host-offloaded shards travel through the device
            tensor = with_local(local(tensor).to(device), tensor)
        assert isinstance(tensor, DTensor)
        whole = tensor.full_tensor()
    else:
        whole = tensor
    return whole.detach().to("cpu", copy=whole is tensor) if wanted else None


def replicas(tensor: Tensor, world_size: int) -> int:
    """How many ranks hold the same part of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return world_size
    parts = 1
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            parts *= tensor.device_mesh.size(dim)
    return world_size // parts


def _is_strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"
