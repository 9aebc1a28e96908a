"""The ``fsdp`` section: how a model is spread over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agilerl.config.section import Section

__all__ = ["FSDPSection"]

_Dtype = Literal["bfloat16", "float16", "float32", "float64"]


class FSDPSection(Section):
    """Sharding over processes (FSDP2). Without it, several processes each hold the whole model (DDP)."""

    enabled: bool = False
    """Shard the model; takes effect under torchrun or `agilerl launch`."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards in host memory."""
    optim_cpu_offload: bool | None = None
    """Keep optimizer state in host memory; nothing: as cpu_offload."""
    defer_grad_sync: bool = True
    """Reduce gradients once per optimizer step instead of once per micro-batch."""
    param_dtype: _Dtype = "bfloat16"
    """Type of gathered weights."""
    reduce_dtype: _Dtype = "float32"
    """Type in which gradients are summed."""
    prefetch_units: int = Field(default=1, ge=0)
    """Blocks gathered ahead in forward."""
    backward_prefetch_units: int = Field(default=1, ge=0)
    """Blocks gathered ahead in backward."""
    checkpoint_skip_layer_types: list[str] = Field(default_factory=list)
    """Layer types whose activations are kept."""
    checkpoint_every_n_blocks: int = Field(default=1, ge=1)
    """Checkpoint activations of every n-th block."""
    wrap_every_n_blocks: int = Field(default=1, ge=1)
    """Blocks per sharded unit."""
    param_persistence_threshold: int = Field(default=100_000, ge=0)
    """Parameters with fewer elements stay whole."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel degree."""
    ep_token_blocks: int = Field(default=1, ge=1)
    """Token blocks of expert parallelism."""
    routed_expert_chunk_mib: int | None = Field(default=None, ge=1)
    """Chunk of routed experts gathered at a time."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallel degree; data parallel size = processes / tp."""
    shard_group_size: int | None = Field(default=None, ge=1)
    """Processes per sharding group (hybrid sharding); nothing: all."""
