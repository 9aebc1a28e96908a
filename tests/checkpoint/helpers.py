"""Small checkpoints made in memory."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from transformers import PreTrainedModel

from agilerl.checkpoint import AdapterContent, CheckpointContent, base_fingerprint
from tests.helpers import tiny_model, tiny_tokenizer


def lora_model(seed: int = 0, **config: Any) -> tuple[PreTrainedModel, PeftModel]:
    """A tiny base model, and a second copy of it with a random trained-looking adapter."""
    base = tiny_model("llama", seed=0)
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    peft = get_peft_model(tiny_model("llama", seed=0), LoraConfig(**(settings | config)), adapter_name="actor")
    generator = torch.Generator().manual_seed(seed)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(generator=generator)
    return base, peft


def lora_content(peft: PeftModel, **fields: Any) -> CheckpointContent:
    """What an agent would capture of a LoRA model, with moments and a tokenizer."""
    tensors = get_peft_model_state_dict(peft, adapter_name="actor")
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": torch.full_like(t, 0.5)} for name, t in tensors.items()}
    values: dict[str, Any] = {
        "algorithm": "SFT",
        "settings": {"lr": 1e-3, "lora_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
        "state": {"steps": 7, "fitness": [-1.5], "rng": torch.get_rng_state()},
        "adapters": {"actor": AdapterContent.of(peft.peft_config["actor"], tensors, "some/base")},
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(tensors)}]},
        "base": {"name_or_path": "some/base", "fingerprint": base_fingerprint(peft)},
        "tokenizer": tiny_tokenizer(chat_template="{{ messages[0]['content'] }}"),
    }
    return CheckpointContent(**(values | fields))


def files_of(path: Any) -> list[str]:
    """Names of all real files and links below a folder."""
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file() or p.is_symlink())
