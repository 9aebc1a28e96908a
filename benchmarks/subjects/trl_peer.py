"""TRL's `SFTTrainer`, in an environment of its own."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from datasets import Dataset
from job import cpu_seconds, read_job, report
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Notes when each optimizer step begins and ends."""

    def __init__(self):
        self.begun, self.ended = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun.append((time.perf_counter(), cpu_seconds()))

    def on_step_end(self, args, state, control, **kwargs):
        self.ended.append((time.perf_counter(), cpu_seconds()))


def main() -> None:
    job = read_job()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    batches = job.batches()
    # Tokens instead of text: TRL encodes prompt and completion in one, which moves newlines between them into the targets.
    pairs = [job.encode(tokenizer, row) for batch in batches for row in batch]
    rows = [{"input_ids": [*p, *r], "labels": [-100] * len(p) + r} for p, r in pairs]
    micro = job.micro_batch_size or job.batch_size
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=micro, gradient_accumulation_steps=job.batch_size // micro,
            max_steps=len(batches), learning_rate=job.lr, lr_scheduler_type="constant", max_grad_norm=job.max_grad_norm,
            weight_decay=0.0, logging_steps=1, report_to="none", save_strategy="no", use_cpu=not torch.cuda.is_available(),
            bf16=False, fp16=False, gradient_checkpointing=job.checkpointing, max_length=2048, seed=42,
            gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        lora = LoraConfig(
            r=job.rank, lora_alpha=job.alpha, lora_dropout=job.dropout, target_modules=list(job.targets), bias="none",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        clock = Clock()
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora,
            callbacks=[clock],
        )  # fmt: skip
        # The rows in the given order, so that every subject takes the same ones in each step.
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        stdout, sys.stdout = sys.stdout, sys.stderr
        trainer.train()
        sys.stdout = stdout
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    spans = list(zip(clock.begun, clock.ended, strict=True))[job.warm_up :]
    seconds, cpu = (sum(end[i] - begin[i] for begin, end in spans) for i in (0, 1))
    encoded = [job.encode(tokenizer, row) for batch in batches[job.warm_up :] for row in batch]
    report(job, encoded, seconds, cpu, losses)


if __name__ == "__main__":
    main()
