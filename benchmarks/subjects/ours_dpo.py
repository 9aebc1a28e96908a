"""This package's DPO, through `DPO.learn`; the prompt shared or not, as the name of the job's output says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms.dpo import DPO
from benchmarks.subjects.job import cpu_seconds, read_job
from benchmarks.subjects.pairs import encode_pair, report


def main() -> None:
    job = read_job()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    lora = LoraConfig(r=job.rank, lora_alpha=job.alpha, target_modules=list(job.targets), bias="none")
    agent = DPO(
        actor_network=AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)),
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        lora_config=lora,
        batch_size=job.batch_size,
        micro_batch_size_per_gpu=job.micro_batch_size,
        lr=job.lr,
        nll_alpha=0.0,
        max_grad_norm=job.max_grad_norm,
        gradient_checkpointing=job.checkpointing,
        share_prompt=os.environ["BENCHMARK_SUBJECT"] == "dpo-shared",
        use_liger_loss=False,
    )

    def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        ids, mask = torch.full((len(rows), width), tokenizer.eos_token_id), torch.zeros(len(rows), width).long()
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        return ids, mask

    def step(rows: list[dict[str, str]]) -> float:
        encoded = [encode_pair(tokenizer, row) for row in rows]
        chosen = padded([prompt + good for prompt, good, _ in encoded])
        rejected = padded([prompt + bad for prompt, _, bad in encoded])
        batch = {
            "prompt_lengths": [len(prompt) for prompt, _, _ in encoded],
            "chosen_input_ids": chosen[0],
            "chosen_attention_mask": chosen[1],
            "rejected_input_ids": rejected[0],
            "rejected_attention_mask": rejected[1],
        }
        return agent.learn(batch)["loss"]

    batches = job.batches()
    losses = [step(batch) for batch in batches[: job.warm_up]]
    timed = batches[job.warm_up :]
    began, used = time.perf_counter(), cpu_seconds()
    losses += [step(batch) for batch in timed]
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    report(tokenizer, [row for batch in timed for row in batch], seconds, cpu, losses)


if __name__ == "__main__":
    main()
