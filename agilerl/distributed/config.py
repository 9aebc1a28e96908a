"""Settings of sharded training; plain data, imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agilerl.errors import ConfigError, UnsupportedError

__all__ = ["DTYPES", "FSDPConfig"]

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class FSDPConfig:
    """How FSDP2 shards a model over the ranks. ``docs/distributed.md`` tells what each field costs and saves.

    All problems of a configuration are told together.

    Raises:
        ConfigError: A field has a value of the wrong type or outside its range.
        UnsupportedError: A field asks for what this version cannot do (expert parallelism).
    """

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for backward."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer state in host memory; the step runs there."""
    optim_cpu_offload: bool | None = None
    """Keep optimizer state in host memory between steps. ``None`` follows ``cpu_offload``."""
    defer_grad_sync: bool = True
    """Reduce gradients once per optimizer step instead of once per micro-batch."""
    param_dtype: str = "bfloat16"
    """Dtype that blocks compute in; the shards keep the dtype they were loaded in."""
    reduce_dtype: str = "float32"
    """Dtype that gradients are summed in over the ranks."""
    prefetch_units: int = 1
    """Units gathered ahead in the forward pass."""
    backward_prefetch_units: int = 1
    """Units gathered ahead in the backward pass."""
    checkpoint_skip_layer_types: tuple[str, ...] = ()
    """Blocks that keep their activations: class names, or entries of the model's ``layer_types``."""
    checkpoint_every_n_blocks: int = 1
    """With gradient checkpointing on, checkpoint one block in every so many."""
    wrap_every_n_blocks: int = 1
    """Neighbouring blocks that are gathered and freed together."""
    param_persistence_threshold: int = 100_000
    """Frozen parameters and adapter factors with fewer elements stay whole on every rank; 0 shards everything."""
    ep: int = 1
    """Expert-parallel degree; only 1."""
    ep_token_blocks: int = 1
    """Token blocks of expert parallelism; only 1."""
    routed_expert_chunk_mib: int | None = None
    """Chunk of routed experts under expert parallelism; only ``None``."""
    tp: int = 1
    """Tensor-parallel degree; the data-parallel size is world size / ``tp``."""
    shard_group_size: int | None = None
    """Ranks that share one set of shards; groups hold replicas (hybrid sharding). ``None``: all ranks are one group."""

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.checkpoint_skip_layer_types, list):  # YAML has no tuples
            object.__setattr__(self, "checkpoint_skip_layer_types", tuple(self.checkpoint_skip_layer_types))
        problems = [*self._type_problems(), *self._range_problems()]
        if problems:
            raise ConfigError("FSDPConfig: " + "; ".join(problems) + ".")
        asked = [name for name in ("ep", "ep_token_blocks") if getattr(self, name) != 1]
        if self.routed_expert_chunk_mib is not None:
            asked.append("routed_expert_chunk_mib")
        if asked:
            raise UnsupportedError(
                f"FSDPConfig: {', '.join(asked)} belongs to expert parallelism, which this version does not have: "
                "leave ep=1, ep_token_blocks=1 and routed_expert_chunk_mib=None."
            )

    def _type_problems(self) -> list[str]:
        problems = []
        for name in ("reshard_after_forward", "cpu_offload", "defer_grad_sync"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.optim_cpu_offload is not None and not isinstance(self.optim_cpu_offload, bool):
            problems.append(f"optim_cpu_offload must be true, false or None, not {self.optim_cpu_offload!r}")
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPES:
                problems.append(f"{name} must be one of {', '.join(DTYPES)}, not {getattr(self, name)!r}")
        skips = self.checkpoint_skip_layer_types
        if not isinstance(skips, tuple) or not all(isinstance(skip, str) for skip in skips):
            problems.append(f"checkpoint_skip_layer_types must be a list of names, not {skips!r}")
        return problems

    def _range_problems(self) -> list[str]:
        lowest = {
            "prefetch_units": 0,
            "backward_prefetch_units": 0,
            "checkpoint_every_n_blocks": 1,
            "wrap_every_n_blocks": 1,
            "param_persistence_threshold": 0,
            "ep": 1,
            "ep_token_blocks": 1,
            "tp": 1,
            "routed_expert_chunk_mib": 1,
            "shard_group_size": 1,
        }
        problems = []
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is None and name in ("routed_expert_chunk_mib", "shard_group_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                problems.append(f"{name} must be a whole number of at least {low}, not {value!r}")
        if self.cpu_offload is True and self.optim_cpu_offload is False:
            problems.append(
                "optim_cpu_offload=False contradicts cpu_offload=True, whose optimizer step runs on the CPU"
            )
        return problems

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state lives in host memory between steps."""
        return self.cpu_offload if self.optim_cpu_offload is None else self.optim_cpu_offload

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for checkpoints."""
        return dataclasses.asdict(self) | {"checkpoint_skip_layer_types": list(self.checkpoint_skip_layer_types)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FSDPConfig:
        """Inverse of :meth:`to_dict`; unknown names are refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"FSDPConfig has no field {', '.join(unknown)}; fields are {', '.join(sorted(known))}.")
        return cls(**values)
