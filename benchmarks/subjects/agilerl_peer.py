"""The published `agilerl` package, in an environment of its own, through the interface of its documentation."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import liger_kernel.transformers as liger
import torch
from job import finish, read_job
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

# The package puts Liger's kernels into the model wherever that library is installed, and asks for the library; on a CPU
# they fail at the first step.
liger._apply_liger_kernel_to_instance = lambda *_, **__: None

from agilerl.algorithms.sft import SFT  # noqa: E402


def main() -> None:
    job = read_job()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    lora = LoraConfig(
        r=job.rank, lora_alpha=job.alpha, lora_dropout=job.dropout, target_modules=list(job.targets), bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    agent = SFT(
        actor_network=model, pad_token_id=tokenizer.eos_token_id, pad_token=tokenizer.eos_token, lora_config=lora,
        batch_size=job.batch_size, micro_batch_size_per_gpu=job.micro_batch_size, lr=job.lr,
        max_grad_norm=job.max_grad_norm, gradient_checkpointing=job.checkpointing, use_liger_loss=False, device="cpu",
    )  # fmt: skip

    def step(rows):
        encoded = [job.encode(tokenizer, row) for row in rows]
        width = max(len(prompt) + len(response) for prompt, response in encoded)
        ids = torch.full((len(rows), width), tokenizer.eos_token_id)
        mask = torch.zeros_like(ids)
        for i, (prompt, response) in enumerate(encoded):
            length = len(prompt) + len(response)
            ids[i, :length], mask[i, :length] = torch.tensor(prompt + response), 1
        result = agent.learn({
            "prompt": [row["prompt"] for row in rows], "response": [row["response"] for row in rows],
            "prompt_lengths": [len(prompt) for prompt, _ in encoded], "input_ids": ids, "attention_mask": mask,
        })  # fmt: skip
        return float(result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result)

    finish(job, tokenizer, step)


if __name__ == "__main__":
    main()
