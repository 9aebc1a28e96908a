"""Supervised fine-tuning from Python: python examples/sft.py."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms.sft import SFT
from agilerl.assets import COMMANDS
from agilerl.llm_envs import DatasetEnv
from agilerl.models.presets import load_preset_folder
from agilerl.training.llm import train_llm_dataset
from agilerl.utils.utils import save_llm_checkpoint

# A small model and a data set that need no download; names of the Hub, such as "Qwen/Qwen2.5-3B", work as well.
model_name = load_preset_folder("smollm2-135m")
data = load_dataset("json", data_files=COMMANDS)

model = AutoModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)

env = DatasetEnv(
    train_dataset=data["train"],
    test_dataset=data["test"],
    tokenizer=tokenizer,
    objective="sft",
    data_batch_size_per_gpu=16,
)

agent = SFT(
    actor_network=model,
    pad_token_id=tokenizer.pad_token_id,
    pad_token=tokenizer.pad_token,
    device="cuda" if torch.cuda.is_available() else "cpu",
    batch_size=32,
    lr=1e-3,
    max_grad_norm=1.0,
    lora_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    gradient_checkpointing=False,
    seed=42,
)

train_llm_dataset(pop=[agent], env=env, max_steps=320)  # a step is one row
save_llm_checkpoint(agent, "outputs/example")
