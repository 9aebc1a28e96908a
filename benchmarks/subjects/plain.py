"""The loop that anyone writes first: transformers and peft, padded micro-batches, the model's own loss."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.subjects.job import finish, read_job


def main() -> None:
    job = read_job()
    torch.set_num_threads(job.threads)
    torch.manual_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    lora = LoraConfig(
        r=job.rank, lora_alpha=job.alpha, lora_dropout=job.dropout, target_modules=list(job.targets), bias="none"
    )
    model = get_peft_model(model, lora)
    if job.checkpointing:
        inner = model.get_base_model()
        name = "activation_checkpointing_enable"
        getattr(inner, name if hasattr(inner, name) else "gradient_checkpointing_enable")({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job.lr, weight_decay=0.0)
    size = job.micro_batch_size or job.batch_size

    def step(rows: list[dict[str, str]]) -> float:
        encoded = [job.encode(tokenizer, row) for row in rows]
        total = sum(len(response) for _, response in encoded)
        summed = 0.0
        for start in range(0, len(rows), size):
            part = encoded[start : start + size]
            width = max(len(prompt) + len(response) for prompt, response in part)
            ids = torch.full((len(part), width), tokenizer.eos_token_id)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
            for i, (prompt, response) in enumerate(part):
                length = len(prompt) + len(response)
                ids[i, :length], mask[i, :length] = torch.tensor(prompt + response), 1
                labels[i, len(prompt) : length] = torch.tensor(response)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=total).loss
            loss.backward()
            summed += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return summed

    finish(job, tokenizer, step)


if __name__ == "__main__":
    main()
