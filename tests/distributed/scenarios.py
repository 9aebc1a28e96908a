"""Runs that must come out the same on any number of ranks; imported by the tests and by the ranks they launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from agilerl.distributed import FSDPConfig, get_rank, get_world_size
from agilerl.models.segments import Sample
from tests.helpers import random_rows, tiny_model, tiny_vision_model
from tests.models.test_multimodal import image_row

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PRECISE = {"param_dtype": "float64", "reduce_dtype": "float64"}
SINGLE = {"param_dtype": "float32", "reduce_dtype": "float32"}
SHARD_ALL = {"param_persistence_threshold": 0}

Run = dict[str, Any]


def global_batches(steps: int = 5) -> list[list[tuple[Tensor, int]]]:
    """(ids, prompt length) rows of each step: uneven lengths, 7 or 8 rows, and one step with a single row."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for step in range(steps):
        rows = []
        for _ in range(1 if step == 2 else 7 + step % 2):
            length = int(torch.randint(3, 20, (1,), generator=generator))
            ids = torch.randint(3, 128, (length,), generator=generator)
            rows.append((ids, int(torch.randint(1, length, (1,), generator=generator))))
        batches.append(rows)
    return batches


def batch_of(rows: list[tuple[Tensor, int]], rank: int, world: int) -> dict[str, Any]:
    """This rank's share of the rows, padded; may hold no row."""
    mine = rows[rank::world]
    width = max((len(ids) for ids, _ in mine), default=0)
    ids = torch.zeros(len(mine), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, (tokens, _) in enumerate(mine):
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [prompt for _, prompt in mine]}


def make_agent(
    *,
    family: str = "llama",
    lora: bool = True,
    dtype: str = "float64",
    fsdp: dict[str, Any] | None = None,
    modules_to_save: list[str] | None = None,
    tied: bool = False,
    folder: str | None = None,
    **settings: Any,
) -> SFT:
    """An agent on a tiny model; adapters start from values that give every parameter a gradient."""
    config = None
    if lora:
        config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, modules_to_save=modules_to_save)
    network = None
    if folder is None:
        network = tiny_model(family, seed=0, dtype=getattr(torch, dtype), tie_word_embeddings=tied)
    agent = SFT(
        0,
        "<pad>",
        actor_network=network,
        model_name=folder,
        lora_config=config,
        fsdp_config=FSDPConfig(**fsdp) if fsdp is not None else None,
        **{"lr": 1e-2, "batch_size": 8, "micro_batch_size_per_gpu": 2, "max_grad_norm": 0.5, **settings},
    )
    stir(agent)
    return agent


def stir(agent: SFT) -> None:
    """Give every B factor known values."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in agent.actor.named_parameters():
        if "lora_B" in name:
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            agent.runtime.copy_into(parameter, value.to(parameter.dtype))


def trained(agent: SFT | DPO) -> dict[str, Tensor]:
    """Whole trainable tensors on rank 0."""
    return agent.runtime.collect({n: p for n, p in agent.actor.named_parameters() if p.requires_grad})


def train(agent: SFT, batches: list[list[tuple[Tensor, int]]] | None = None) -> Run:
    """Train on every global batch; what must not depend on the ranks."""
    runtime = agent.runtime
    metrics = []
    for rows in global_batches() if batches is None else batches:
        got = agent.learn(batch_of(rows, runtime.dp_rank, runtime.dp_size))
        metrics.append([got["loss"], got["grad_norm"], got["tokens"]])
    return {"metrics": metrics, "weights": trained(agent)}


SCENARIOS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora": False},
    "full_tied": {"lora": False, "tied": True},
    "lora_saved_head": {"modules_to_save": ["lm_head"]},
    "lora_no_checkpointing": {"gradient_checkpointing": False, "family": "qwen2"},
    "full_float32": {"lora": False, "dtype": "float32", "lr": 1e-4},
    "lora_float32": {"dtype": "float32", "lr": 1e-4},
}
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp": SHARD_ALL,
    "fsdp_options": {
        "reshard_after_forward": False,
        "defer_grad_sync": False,
        "wrap_every_n_blocks": 2,
        "prefetch_units": 2,
        "backward_prefetch_units": 0,
        "checkpoint_every_n_blocks": 2,
        "cpu_offload": True,
        "param_persistence_threshold": 200,
    },
}


def run_scenario(scenario: str, layout: str) -> Run:
    """One scenario on the present ranks."""
    settings = dict(SCENARIOS[scenario])
    fields = LAYOUTS[layout]
    if fields is not None:
        fields = fields | (SINGLE if settings.get("dtype") == "float32" else PRECISE)
    agent = make_agent(fsdp=fields, **settings)
    run = train(agent)
    agent.clean_up()
    return run


def pairs_of(rows: list[tuple[Tensor, int]], rank: int, world: int) -> dict[str, Any]:
    """This rank's share of pairs: each row is the chosen answer, the rejected one its reversal."""
    chosen = batch_of(rows, rank, world)
    turned = [(torch.cat([ids[:prompt], ids[prompt:].flip(0), ids[:1]]), prompt) for ids, prompt in rows]
    rejected = batch_of(turned, rank, world)
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt_lengths": chosen["prompt_lengths"]} | {
        f"{side}_{name}": batch[name] for side, batch in sides.items() for name in ("input_ids", "attention_mask")
    }


PREFERENCES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "separate": {"share_prompt": False},
    "smoothed": {"label_smoothing": 0.2},
    "ipo": {"loss_type": "ipo"},
    "hinge": {"loss_type": "hinge"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm"},
    "simpo": {"loss_type": "simpo", "share_prompt": False},
}


def run_dpo(layout: str, preference: str = "sigmoid") -> Run:
    """Preference optimisation on the present ranks; a norm that computes in float64 shows shared prompts exactly."""
    fields = LAYOUTS[layout]
    agent = DPO(
        0,
        "<pad>",
        actor_network=tiny_model("phi", seed=0, dtype=torch.float64),
        lora_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
        fsdp_config=FSDPConfig(**fields, **PRECISE) if fields is not None else None,
        lr=1e-2,
        batch_size=8,
        micro_batch_size_per_gpu=2,
        max_grad_norm=0.5,
        **PREFERENCES[preference],
    )
    metrics = []
    for rows in global_batches():
        got = agent.learn(pairs_of(rows, agent.runtime.dp_rank, agent.runtime.dp_size))
        metrics.append([got[name] for name in ("loss", "grad_norm", "tokens", "reward_margin", "accuracy")])
    run = {"metrics": metrics, "weights": trained(agent)}
    agent.clean_up()
    return run


PICTURED: dict[str, dict[str, Any]] = {
    "tower": {"family": "llava", "lora": ["q_proj", "v_proj"]},  # adapters in the vision tower, too
    "full": {"family": "llava"},
    "language": {"family": "qwen2_vl", "lora": ["q_proj"], "lora_target_scope": "language_model"},
}


def pictured_rows(family: str) -> list[Sample]:
    """Rows with and without an image in turn, so that of two ranks only the first has images."""
    rows = []
    for number, ids in enumerate(random_rows([9, 5, 7, 6, 8], vocab=100)):
        rows.append(image_row(family, number) if number % 2 == 0 else Sample(ids, torch.ones(len(ids))))
    return rows


def run_pictures(scenario: str, layout: str) -> Run:
    """Rows with images on the present ranks."""
    settings = dict(PICTURED[scenario])
    family, targets = settings.pop("family"), settings.pop("lora", None)
    fields = LAYOUTS[layout]
    agent = SFT(
        0,
        "<pad>",
        actor_network=tiny_vision_model(family, dtype=torch.float64),
        lora_config=LoraConfig(r=2, lora_alpha=4, target_modules=targets) if targets else None,
        fsdp_config=FSDPConfig(**fields, **PRECISE) if fields is not None else None,
        lr=1e-2,
        batch_size=6,
        micro_batch_size_per_gpu=2,
        max_grad_norm=0.5,
        **settings,
    )
    stir(agent)
    rows = pictured_rows(family)[agent.runtime.dp_rank :: agent.runtime.dp_size]
    pad = torch.nn.utils.rnn.pad_sequence
    batch: dict[str, Any] = {
        "input_ids": pad([row.ids for row in rows], batch_first=True),
        "attention_mask": pad([torch.ones_like(row.ids) for row in rows], batch_first=True),
        "response_weights": pad([row.weights.float() for row in rows], batch_first=True),
        "inputs": [row.extra for row in rows],
    }
    metrics = []
    for _ in range(3):
        got = agent.learn(batch)
        metrics.append([got["loss"], got["grad_norm"], got["tokens"]])
    # A bias that all keys share changes no attention: its gradient is rounding, which Adam makes steps of.
    weights = {name: value for name, value in trained(agent).items() if not name.endswith("k_proj.bias")}
    agent.clean_up()
    return {"metrics": metrics, "weights": weights}


def save_tiny(folder: Path, family: str = "llama", **overrides: Any) -> str:
    """A tiny float64 model on disk."""
    tiny_model(family, seed=0, dtype=torch.float64, **overrides).save_pretrained(folder)
    return str(folder)


def here() -> tuple[int, int]:
    """(rank, world size)."""
    return get_rank(), get_world_size()
