"""Tensor parallelism: the matrices of a block split over neighbouring ranks (Shoeybi et al., arXiv 1909.08053).

Queries, keys, values, gate and up projections are split by output column, so that each rank has whole heads; the output
and down projections by input row. Under LoRA the factor that meets the split side is split with it and the other stays
whole: ``base_layer`` and ``lora_B`` by column, or ``base_layer`` and ``lora_A`` by row.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from agilerl.distributed.checkpointing import blocks_of
from agilerl.errors import ConfigError, UnsupportedError

__all__ = ["FAMILIES", "PARTIAL", "mark_partial_gradients", "split_blocks"]

PARTIAL = "_agilerl_partial_over_split"

FAMILIES = ("gemma", "gemma2", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")


def mark_partial_gradients(model: nn.Module) -> None:
    """Mark whole parameters that act on a rank's own heads only: their gradients are summed over the split too."""
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] in ("q_norm", "k_norm"):
            setattr(parameter, PARTIAL, True)


def split_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split every block of ``model`` over ``mesh``; embeddings, norms and head stay whole.

    Raises:
        UnsupportedError: The family, or an adapter of it, has no plan.
        ConfigError: Heads or widths do not divide.
    """
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"tensor parallelism has no plan for {config.model_type!r} models; it has one for {', '.join(FAMILIES)}: "
            "use tp=1 (sharding needs no plan)."
        )
    degree = mesh.size()
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, field) % degree:
            raise ConfigError(f"FSDPConfig: tp={degree} does not divide the model's {field}={getattr(config, field)}.")
    for name, block in blocks_of(model):
        plan: dict[str, Any] = {}
        for path in (*COLUMN, *ROW):
            plan |= _plan_of(f"{name}.{path}", path, block.get_submodule(path), by_column=path in COLUMN)
        parallelize_module(block, mesh, plan)


def _plan_of(full_name: str, path: str, module: nn.Module, *, by_column: bool) -> dict[str, Any]:
    style = ColwiseParallel if by_column else RowwiseParallel
    if type(module) is nn.Linear:
        return {path: style()}
    factors = getattr(module, "lora_B" if by_column else "lora_A", None)
    dora = any(getattr(module, "use_dora", {}).values())
    if factors is None or dora or type(getattr(module, "base_layer", None)) is not nn.Linear:
        raise UnsupportedError(
            f"tensor parallelism cannot split {full_name} ({type(module).__name__}{' with DoRA' if dora else ''}): use "
            "plain LoRA or full weights there, or tp=1."
        )
    factor = "lora_B" if by_column else "lora_A"
    return {f"{path}.base_layer": style()} | {f"{path}.{factor}.{name}": style() for name in factors}
