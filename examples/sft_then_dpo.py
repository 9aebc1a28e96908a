"""Two stages: learn commands, then learn to ask for what is missing. Run: python examples/sft_then_dpo.py."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms import DPO, SFT
from agilerl.assets import CLARIFY, COMMANDS
from agilerl.llm_envs import DatasetEnv
from agilerl.models.presets import load_preset_folder
from agilerl.training.llm import train_llm_dataset
from agilerl.utils.utils import save_llm_checkpoint

model_name = load_preset_folder("smollm2-135m")
tokenizer = AutoTokenizer.from_pretrained(model_name)
commands = load_dataset("json", data_files=COMMANDS)
pairs = load_dataset("json", data_files=CLARIFY)

shared = {
    "pad_token_id": tokenizer.pad_token_id,
    "pad_token": tokenizer.pad_token,
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "lora_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
}

# Stage 1: prompts and answers.
env = DatasetEnv(commands["train"], commands["test"], tokenizer, objective="sft")
sft = SFT(actor_network=AutoModelForCausalLM.from_pretrained(model_name), lr=1e-3, **shared)
train_llm_dataset(pop=[sft], env=env, max_steps=320, checkpoint_path="outputs/stages/sft")
save_llm_checkpoint(sft, "outputs/sft-stage")
sft.clean_up()

# Stage 2: pairs. The loaded policy is also the reference, so the first loss is ln 2 plus the NLL term.
env = DatasetEnv(pairs["train"], pairs["test"], tokenizer, objective="preference")
dpo = DPO(actor_network=AutoModelForCausalLM.from_pretrained(model_name), lr=2e-4, **shared)
dpo.load_checkpoint("outputs/sft-stage")
print("margin before:", dpo.test(env, loop=None))
train_llm_dataset(pop=[dpo], env=env, num_epochs=1, checkpoint_path="outputs/stages/dpo")
print("margin after:", dpo.test(env, loop=None))
save_llm_checkpoint(dpo, "outputs/dpo-stage")
