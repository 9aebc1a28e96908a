"""Which parameters are gathered together, and when.

The units are the blocks of the language model, and one more for what lies outside them: embeddings, final norm and head,
and the vision tower where there is one. Training calls the backbone and the head directly and never the whole model, so
that the outer unit is opened by hand around each micro-batch; the blocks open and close themselves. A block that opens
itself must run on every rank, or the others would wait for it: a tower does not run on a rank whose rows have no image.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from agilerl.distributed.checkpointing import blocks_of, text_blocks_of
from agilerl.distributed.config import FSDPConfig
from agilerl.distributed.shards import mesh_names

__all__ = ["close_units", "expect_outer_gradients", "open_units", "shard_units", "sync_gradients", "units_of"]

OPENER = "_agilerl_open_outer_unit"
OUTER = "_agilerl_outer_parameters"


def shard_units(model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, device: torch.device) -> None:
    """Shard ``model`` in place over ``mesh``: blocks first, then the rest."""
    compute = getattr(torch, config.param_dtype)
    reduce = getattr(torch, config.reduce_dtype)
    whole = _kept_whole(model, config.param_persistence_threshold, compute)
    _level_trainable_dtypes(model, whole)
    offload: OffloadPolicy = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
        "offload_policy": offload,
        "ignored_params": whole,
    }
    blocks = [block for _, block in text_blocks_of(model)]
    size = config.wrap_every_n_blocks
    units: list[list[nn.Module]] = []
    for start in range(0, len(blocks), size):
        unit = blocks[start : start + size]
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=config.reshard_after_forward, **settings)
        units.append(unit)
    outer = [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter not in whole and "shard" not in mesh_names(parameter)
    ]
    fully_shard(model, reshard_after_forward=False, **settings)
    model.__dict__[OUTER] = outer  # past nn.Module's own bookkeeping, which would register the modules
    for parameter in whole:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    _add_opener(model)
    _level_first_inputs(model)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1.0)  # the loss is divided already: gradients are summed
        if hasattr(unit, "set_force_sum_reduction_for_comms"):
            unit.set_force_sum_reduction_for_comms(True)  # a plain sum, which gloo knows too
    _set_prefetch([unit[0] for unit in units], config)


def units_of(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module that FSDP2 manages."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def open_units(model: nn.Module) -> None:
    """Gather what lies outside the blocks; blocks gather themselves when they run."""
    close_units(model)
    if hasattr(model, OPENER):  # else the model is not sharded yet
        getattr(model, OPENER)()


def expect_outer_gradients(model: nn.Module) -> None:
    """Zero gradients for what lies outside the blocks, while it is open.

    A rank whose micro-batch has no target does not run the head, and one without images no vision tower; it must take part
    in the sum of their gradients all the same.
    """
    for module, name in model.__dict__.get(OUTER, ()):
        parameter = getattr(module, name)
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def close_units(model: nn.Module) -> None:
    """Free whatever is gathered. Weights changed since the last gathering are seen by the next one."""
    for unit in units_of(model):
        unit.reshard()


def sync_gradients(model: nn.Module, reduce: bool, is_last: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduce)
    model.set_is_last_backward(is_last or reduce)


def _level_first_inputs(model: nn.Module) -> None:
    """Let the first block's input have a gradient on every rank where a trained vision tower gives it one on some.

    FSDP2 reduces a block's gradients when its input's are done, and at the very end where the input has none: ranks with
    and without images would sum in different orders.
    """
    blocks = text_blocks_of(model)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not blocks or len(blocks) == len(blocks_of(model)):
        return
    first = base.get_input_embeddings()
    elsewhere = {*base.get_decoder().parameters(), *base.get_output_embeddings().parameters()}
    if first.weight.requires_grad or not any(p.requires_grad and p not in elsewhere for p in model.parameters()):
        return

    def require(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    first.register_forward_hook(require)


def _add_opener(model: nn.Module) -> None:
    """Methods that gather the outer unit: one that does nothing else, and generation, which skips PEFT's forward."""
    setattr(model, OPENER, types.MethodType(lambda _self: None, model))
    register_fsdp_forward_method(model, OPENER)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def _kept_whole(model: nn.Module, threshold: int, compute: torch.dtype) -> set[nn.Parameter]:
    """Small parameters that every rank keeps whole; frozen ones take the dtype that their block computes in.

    PEFT casts the input of adapter factors to their dtype, so these may stay in float32. Other trainable parameters are
    kept whole only where they are in the compute dtype already: FSDP2 keeps their full-precision shards otherwise.
    """
    kept = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 0 and parameter.numel() >= threshold:
            continue
        is_factor = any(part.startswith(("lora_A", "lora_B", "lora_embedding_")) for part in name.split("."))
        if parameter.requires_grad and not is_factor and parameter.dtype != compute and parameter.dim() > 0:
            continue
        if not parameter.requires_grad and not is_factor and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
        kept.add(parameter)
    return kept


def _level_trainable_dtypes(model: nn.Module, whole: set[nn.Parameter]) -> None:
    """One dtype for all sharded trainable parameters, as FSDP2 wants it: the widest that occurs, at least float32.

    Half-precision weights get full-precision shards: blocks compute in ``param_dtype`` whatever the shards are, and most
    updates are too small to be added to a bfloat16 weight.
    """
    sharded = [p for p in model.parameters() if p.requires_grad and p not in whole]
    widest = max((p.dtype for p in sharded), key=lambda dtype: dtype.itemsize, default=torch.float32)
    widest = torch.float32 if widest.itemsize < 4 else widest
    for parameter in sharded:
        if parameter.dtype != widest:
            parameter.data = parameter.data.to(widest)


def _set_prefetch(units: list[nn.Module], config: FSDPConfig) -> None:
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        ahead = units[index + 1 : index + 1 + config.prefetch_units]
        behind = units[max(0, index - config.backward_prefetch_units) : index][::-1]
        unit.set_modules_to_forward_prefetch(ahead)  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(behind)  # type: ignore[arg-type]
