"""Which ranks share shards, hold replicas, and split matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agilerl.distributed.config import FSDPConfig
from agilerl.errors import ConfigError

__all__ = ["Meshes", "make_meshes"]


@dataclass(frozen=True)
class Meshes:
    """Meshes of one layout; neighbouring ranks split matrices first (fastest links), then share shards."""

    shard: DeviceMesh
    """1-D, or 2-D (replicas, shards) with hybrid sharding."""
    tp: DeviceMesh | None
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int


def make_meshes(device_type: str, config: FSDPConfig) -> Meshes:
    """Meshes for the running process group; made once per layout, since each makes process groups.

    Raises:
        ConfigError: ``tp`` or ``shard_group_size`` does not divide the ranks.
    """
    world = dist.get_world_size()
    if world % config.tp:
        raise ConfigError(f"FSDPConfig: tp={config.tp} does not divide the {world} ranks.")
    dp_size = world // config.tp
    shards = dp_size if config.shard_group_size is None else config.shard_group_size
    if dp_size % shards:
        raise ConfigError(
            f"FSDPConfig: shard_group_size={shards} does not divide the {dp_size} data-parallel ranks "
            f"({world} ranks / tp={config.tp})."
        )
    return _meshes(device_type, dp_size // shards, shards, config.tp, id(dist.group.WORLD))


@lru_cache(maxsize=16)
def _meshes(device_type: str, replicas: int, shards: int, tp: int, world: int) -> Meshes:
    """``world`` is the identity of the process group, so that a later group gets meshes of its own."""
    if replicas == 1:
        mesh = init_device_mesh(device_type, (shards, tp), mesh_dim_names=("shard", "tp"))
        group, rank = mesh.get_group("shard"), mesh.get_local_rank("shard")
        return Meshes(mesh["shard"], mesh["tp"] if tp > 1 else None, group, rank, shards)
    mesh = init_device_mesh(device_type, (replicas, shards, tp), mesh_dim_names=("replicate", "shard", "tp"))
    whole = init_device_mesh(device_type, (replicas * shards, tp), mesh_dim_names=("dp", "tp"))
    return Meshes(
        mesh["replicate", "shard"],
        mesh["tp"] if tp > 1 else None,
        whole.get_group("dp"),
        whole.get_local_rank("dp"),
        replicas * shards,
    )
