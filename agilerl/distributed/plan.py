"""How much memory a run will take on each rank, and how long a step, before it is started.

Weights, gradients and optimizer state are counted exactly, on a model built without memory. Activations follow the
shapes of a transformer block; their coefficients were set by measuring training steps (``benchmarks/plan_accuracy.py``
compares).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agilerl import lanes
from agilerl.distributed.checkpointing import text_blocks_of
from agilerl.distributed.config import FSDPConfig
from agilerl.distributed.skeleton import parameters_on_meta

__all__ = ["Plan", "Workload", "count", "estimate", "hollow_model", "plan_of"]

TILE_LOGITS = 2**24
"""Logits that the loss holds at a time are about this many, and at least one row of them."""
LATE_LIBRARIES = 50 * 2**20
"""Code and work space that a process on a CPU takes up in its first steps only."""
MAPPED_FROM = 32 * 2**20
"""Arrays from this size on go back to the system when they are freed; smaller ones stay in the C library's heap (glibc),
where later arrays do not always fit into what is free. ``MALLOC_MMAP_THRESHOLD_`` sets another size."""
HELD_FREED, HELD_LIVE = 0.55, 0.15
"""What that heap holds without use, relative to activations that checkpointing frees, and to those that are kept."""


@dataclass(frozen=True)
class Workload:
    """The largest micro-batch of a rank, and a whole optimizer step.

    Attributes:
        tokens: Tokens of the largest micro-batch, with padding where the model needs it.
        targets: Trained tokens among them.
        longest: Longest row.
        step_tokens: Tokens of one optimizer step on this rank; 0: one micro-batch.
    """

    tokens: int
    targets: int
    longest: int
    step_tokens: int = 0


@dataclass(frozen=True)
class Counts:
    """Elements of a model's parameters.

    Attributes:
        frozen: Base parameters that are not trained.
        trained: Parameters that are.
        outside: Of both, those outside the blocks (embeddings, head, a vision tower).
        blocks: Number of blocks.
        adapter_rank: Sum of the ranks of adapted layers in one block.
    """

    frozen: int
    trained: int
    outside: int
    blocks: int
    adapter_rank: int = 0


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose, and what they add up to on each rank.

    Attributes:
        parts: Bytes by purpose during a training step.
        load_bytes: Peak while the model is loaded.
        step_flops: Floating-point operations of one optimizer step on one rank.
        advice: What would need less memory, best first.
    """

    parts: Mapping[str, int]
    load_bytes: int
    step_flops: float
    advice: tuple[str, ...] = field(default=())

    @property
    def step_bytes(self) -> int:
        """Peak during a training step."""
        return sum(self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole run."""
        return max(self.load_bytes, self.step_bytes)

    def seconds_per_step(self, flops_per_second: float) -> float:
        """Time of one optimizer step on hardware that sustains ``flops_per_second``."""
        return self.step_flops / flops_per_second


def estimate(
    folder: str | Path,
    lora_config: Any,
    workload: Workload,
    *,
    dtype: str = "float32",
    gradient_checkpointing: bool = True,
    fsdp: FSDPConfig | None = None,
    world_size: int = 1,
    device: str = "cpu",
) -> Plan:
    """Plan a run on the model in ``folder``; reads its configuration only.

    Args:
        folder: Folder with a ``config.json``, or a name on the Hub.
        lora_config: Adapters; None trains every weight.
        workload: What a rank computes at a time.
        dtype: Type that the base is loaded in.
        gradient_checkpointing: Whether blocks are recomputed in backward.
        fsdp: Sharding; None keeps a whole model on every rank.
        world_size: Number of ranks.
        device: ``"cpu"`` or ``"cuda"``.
    """
    model = hollow_model(folder, lora_config)
    config: Any = model.config
    return plan_of(
        count(model),
        config.get_text_config(),
        workload,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        fsdp=fsdp,
        world_size=world_size,
        device=device,
    )


def hollow_model(folder: str | Path, lora_config: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """The model in ``folder`` with its adapters, but without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    takes_images = (
        config.get_text_config() is not config and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    with parameters_on_meta():
        model: Any = kind.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    if lora_config is None:
        return model
    from peft import get_peft_model

    return get_peft_model(model, copy.deepcopy(lora_config), low_cpu_mem_usage=True)


def count(model: nn.Module) -> Counts:
    """Count a model's parameters; a model on the meta device will do."""
    blocks = text_blocks_of(model)
    inside = {parameter for _, block in blocks for parameter in block.parameters()}
    ranks = 0
    for module in blocks[0][1].modules() if blocks else ():
        factors = getattr(module, "lora_B", None)
        if isinstance(factors, nn.ModuleDict):
            for factor in factors.values():
                ranks += int(factor.in_features)  # type: ignore[arg-type]
    parameters = list(model.parameters())
    return Counts(
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        outside=sum(p.numel() for p in parameters if p not in inside),
        blocks=len(blocks),
        adapter_rank=ranks,
    )


def plan_of(
    counts: Counts,
    config: Any,
    workload: Workload,
    *,
    dtype: str,
    gradient_checkpointing: bool,
    fsdp: FSDPConfig | None,
    world_size: int,
    device: str,
) -> Plan:
    """Plan from counts and a text model's configuration; see :func:`estimate`."""
    base = getattr(torch, dtype).itemsize
    layout = _Layout.of(fsdp, world_size, base)
    is_full = counts.frozen == 0
    parts = _state_bytes(counts, layout, base, is_full)
    if fsdp is not None:
        parts |= _open_bytes(counts, layout, fsdp, is_full)
    parts |= _passing_bytes(
        counts,
        config,
        workload,
        layout,
        gradient_checkpointing=gradient_checkpointing,
        is_full=is_full,
        is_on_cpu=device == "cpu",
        may_use_lanes=world_size == 1 and fsdp is None and not is_full,
    )
    if fsdp is not None and device != "cpu":
        for name in ("weights", "gradients", "optimizer") if fsdp.cpu_offload else ():
            parts.pop(name)
        if fsdp.offloads_optimizer:
            parts.pop("optimizer", None)
    total = counts.frozen + counts.trained
    kept_as = getattr(config, "dtype", None)
    stored = kept_as.itemsize if isinstance(kept_as, torch.dtype) else base
    converted = total * stored if stored != base else 0  # the file's own pages are in memory meanwhile
    load = total * base + converted if fsdp is None else (total * base + counts.outside * base) // layout.shards
    forward = 2.0 * total * (workload.step_tokens or workload.tokens)
    backward = forward * (2 if is_full else 1) + (forward if gradient_checkpointing else 0)
    plan = Plan(parts, load, (forward + backward) / layout.tp)
    return replace(plan, advice=_advice(plan, is_full, gradient_checkpointing, fsdp, world_size))


@dataclass(frozen=True)
class _Layout:
    """Numbers that follow from the sharding: ranks that share a tensor, and bytes per value in computation."""

    shards: int
    tp: int
    compute: int
    every: int
    is_sharded: bool

    @classmethod
    def of(cls, fsdp: FSDPConfig | None, world_size: int, base: int) -> _Layout:
        if fsdp is None:
            return cls(1, 1, base, 1, False)
        shards = fsdp.shard_group_size or max(1, world_size // fsdp.tp)
        compute = getattr(torch, fsdp.param_dtype).itemsize
        return cls(shards, fsdp.tp, compute, fsdp.checkpoint_every_n_blocks, True)


def _state_bytes(counts: Counts, layout: _Layout, base: int, is_full: bool) -> dict[str, int]:
    """What lives as long as the run: weights, gradients, moments."""
    master = max(base, 4)
    trained = base if is_full and not layout.is_sharded else master
    split = layout.shards * layout.tp
    parts = {
        "weights": (counts.frozen * base + counts.trained * trained) // split,
        "gradients": counts.trained * trained // split,
        "optimizer": 2 * counts.trained * master // split,
    }
    if trained < master:
        parts["masters"] = counts.trained * master
    return parts


def _open_bytes(counts: Counts, layout: _Layout, fsdp: FSDPConfig, is_full: bool) -> dict[str, int]:
    """What is gathered at a time."""
    per_block = (counts.frozen + counts.trained - counts.outside) // max(1, counts.blocks)
    ahead = fsdp.wrap_every_n_blocks * (1 + max(fsdp.prefetch_units, fsdp.backward_prefetch_units))
    open_blocks = min(counts.blocks, ahead) if fsdp.reshard_after_forward else counts.blocks
    parts = {"gathered": (counts.outside + open_blocks * per_block // layout.tp) * layout.compute}
    if fsdp.defer_grad_sync and is_full:
        parts["unreduced gradients"] = counts.trained * layout.compute // layout.tp
    return parts


def _passing_bytes(
    counts: Counts,
    config: Any,
    workload: Workload,
    layout: _Layout,
    *,
    gradient_checkpointing: bool,
    is_full: bool,
    is_on_cpu: bool,
    may_use_lanes: bool,
) -> dict[str, int]:
    """What comes and goes within a step."""
    arrays = [size * layout.compute // layout.tp for size in _block_arrays(config, counts)]
    kept = -(-counts.blocks // layout.every) if gradient_checkpointing else 0
    whole = counts.blocks - kept
    # On a CPU a recomputed block keeps what its attention gave as well as its input (`agilerl.models.cpu_attention`).
    stays = config.hidden_size + (_attention_sizes(config)[0] // layout.tp if is_on_cpu else 0)
    parts = {"activations": workload.tokens * (kept * stays * layout.compute + whole * sum(arrays))}
    num_lanes = lanes.NUM_LANES if is_on_cpu and may_use_lanes and lanes.pay_off(config.hidden_size) else 1
    loss, tile = _loss_bytes(config, workload, layout.compute, trains_head=is_full, num_lanes=num_lanes)
    if is_on_cpu and not is_full:
        parts["logits"] = tile  # the array stays for the next micro-batch
    else:
        loss += tile
    again = workload.tokens * sum(arrays) if kept else 0
    # Blocks are recomputed one by one after the loss has freed what it needed.
    parts["loss" if loss >= again else "recomputed block"] = max(loss, again)
    if is_on_cpu:
        limit = _mapped_from()
        in_heap = workload.tokens * sum(size for size in arrays if workload.tokens * size < limit)
        parts["libraries"] = LATE_LIBRARIES
        parts["allocator"] = int((HELD_FREED * kept + HELD_LIVE * whole) * in_heap)
    return parts


def _mapped_from() -> int:
    given = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(given) if given.isdigit() else MAPPED_FROM


def _block_arrays(config: Any, counts: Counts) -> list[int]:
    """Sizes, per token, of the arrays that one block keeps for backward.

    This is the one place that knows how a block computes (`agilerl.models.attention`, `fused_blocks`, `fused_lora`).
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    queries, keys = _attention_sizes(config)
    return [
        *[hidden] * 4,  # the block's input and the sum after attention, both normalised as well
        *[queries] * 3,  # rotated queries; attention's output, by sample and joined
        *[keys] * 2,  # rotated keys, values
        *[inner] * 3,  # gate, up and their product
        counts.adapter_rank,  # inner products of the adapters
    ]


def _attention_sizes(config: Any) -> tuple[int, int]:
    """Sizes, per token, of the queries and of the keys of all heads."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return head * config.num_attention_heads, head * keys


def _loss_bytes(config: Any, workload: Workload, size: int, *, trains_head: bool, num_lanes: int) -> tuple[int, int]:
    """What the loss needs without and for tiles of logits, of which each lane has one.

    The first are hidden states at the targets with their gradient, and what the head's weight needs. A head in half
    precision is widened for the tile; the gradient of a trained one is summed in single precision, and there are two of
    it when it is scaled, without a tile.
    """
    weight = config.vocab_size * config.hidden_size * 4
    rows = min(-(-workload.targets // num_lanes), max(16, min(4096, TILE_LOGITS // config.vocab_size)))
    tile = num_lanes * rows * config.vocab_size * 4
    widened = num_lanes * weight if size < 4 else 0
    hidden = 2 * workload.targets * config.hidden_size * size
    if trains_head:
        return hidden + weight + max(widened, weight - tile), tile
    return hidden + widened, tile


def _advice(
    plan: Plan, is_full: bool, gradient_checkpointing: bool, fsdp: FSDPConfig | None, world_size: int
) -> tuple[str, ...]:
    parts, advice = plan.parts, []
    if parts.get("allocator", 0) > plan.step_bytes // 8:
        advice.append(
            "THP_MEM_ALLOC_ENABLE=1 MALLOC_MMAP_THRESHOLD_=1048576 in the environment: freed memory goes back to the system, "
            "and a step takes up to a tenth longer"
        )
    if parts["activations"] > plan.step_bytes // 3:
        if not gradient_checkpointing:
            advice.append("sft.gradient_checkpointing=true: blocks are recomputed instead of kept")
        advice.append("a smaller sft.micro_batch_size_per_gpu, or data.max_context_length: activations shrink with it")
    if is_full:
        advice.append("lora.enabled=true: no moments and gradients for the whole model")
    if world_size > 1 and fsdp is None:
        advice.append("fsdp.enabled=true: weights and optimizer state are shared by the ranks")
    if fsdp is not None and not fsdp.cpu_offload:
        advice.append(
            "fsdp.optim_cpu_offload=true, then fsdp.cpu_offload=true: state lives in host memory, steps take longer"
        )
    if fsdp is None and parts["weights"] > plan.step_bytes // 3:
        advice.append("model.dtype=bfloat16, or model.quantization=nf4: smaller frozen weights")
    return tuple(advice) or ("a smaller model: nothing else that is known would save much",)
