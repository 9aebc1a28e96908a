"""A small model, rows of given lengths and an agent, for benchmarks that ask about shape and not about size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["make_agent", "make_batch", "make_model"]


def make_model(
    *,
    vocabulary: int = 4096,
    hidden: int = 256,
    layers: int = 4,
    positions: int = 4096,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 96), max_position_embeddings=positions,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def make_batch(
    lengths: Sequence[int], *, vocabulary: int = 4096, prompt_share: float = 0.5, seed: int = 0
) -> dict[str, Any]:
    """Random rows as `learn` takes them, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(list(lengths))[:, None]).long()
    return {
        "prompt": [""] * len(lengths), "response": [""] * len(lengths), "input_ids": ids * mask, "attention_mask": mask,
        "prompt_lengths": [max(1, int(length * prompt_share)) for length in lengths],
    }  # fmt: skip


def make_agent(model: Any, **settings: Any) -> Any:
    """An SFT agent with LoRA on all projections of attention."""
    from agilerl.algorithms.sft import SFT

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    settings = {"gradient_checkpointing": False, "use_liger_loss": False, **settings}
    return SFT(actor_network=model, pad_token_id=0, pad_token="<pad>", lora_config=lora, **settings)
