"""The job that all subjects do, and how it is timed. Standard library only."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "cpu_seconds", "finish", "read_job", "report"]


@dataclass
class Job:
    """LoRA fine-tuning of one model on given rows.

    Attributes:
        model: Folder of the model.
        rows: File of prompt/response rows, one JSON object per line.
        dtype: float32 or bfloat16.
        checkpointing: Whether blocks are recomputed in the backward pass.
        batch_size: Rows of an optimizer step.
        micro_batch_size: Rows of a micro-batch; None leaves it to the package, where it can choose.
        threads: Of the processor.
        warm_up: Optimizer steps before the clock starts.
        steps: Optimizer steps that are timed.
    """

    model: str
    rows: str
    dtype: str = "float32"
    checkpointing: bool = False
    batch_size: int = 16
    micro_batch_size: int | None = 4
    threads: int = 2
    warm_up: int = 1
    steps: int = 1
    rank: int = 16
    alpha: int = 64
    dropout: float = 0.05
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    lr: float = 5e-5
    max_grad_norm: float = 0.1

    def write(self, path: Path) -> None:
        """Write for `read_job`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def batches(self) -> list[list[dict[str, str]]]:
        """Rows of every optimizer step, the file over and over again."""
        rows = [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]
        needed = self.batch_size * (self.warm_up + self.steps)
        rows = [rows[i % len(rows)] for i in range(needed)]
        return [rows[i : i + self.batch_size] for i in range(0, needed, self.batch_size)]

    def encode(self, tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
        """Prompt and response apart, one end-of-sequence token at the end."""
        prompt = tokenizer(row["prompt"]).input_ids
        response = tokenizer(row["response"], add_special_tokens=False).input_ids
        return prompt, [*response, tokenizer.eos_token_id]


def read_job() -> Job:
    """Read the job named on the command line."""
    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return Job(**{**values, "targets": tuple(values["targets"])})


def finish(job: Job, tokenizer: Any, step: Callable[[list[dict[str, str]]], float], **more: Any) -> None:
    """Run and time the steps, one call each, and print the result."""
    batches = job.batches()
    losses = [step(batch) for batch in batches[: job.warm_up]]
    timed = batches[job.warm_up :]
    encoded = [job.encode(tokenizer, row) for batch in timed for row in batch]
    began, used = time.perf_counter(), cpu_seconds()
    losses += [step(batch) for batch in timed]
    report(job, encoded, time.perf_counter() - began, cpu_seconds() - used, losses, **more)


def cpu_seconds() -> float:
    """Processor time of this process. With one thread it hardly depends on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report(
    job: Job, encoded: list[tuple[list[int], list[int]]], seconds: float, cpu: float, losses: list[float], **more: Any
) -> None:
    """Print one line of JSON: rates over real tokens, peak memory of the process, losses."""
    real = sum(len(prompt) + len(response) for prompt, response in encoded)
    trained = sum(len(response) for _, response in encoded)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "tokens_per_s": real / seconds,
        "trained_tokens_per_s": trained / seconds,
        "seconds": seconds,
        "tokens_per_cpu_s": real / cpu,
        "tokens": real,
        "peak_gb": peak * 1024 / 1e9,
        "losses": losses,
        **more,
    }
    print(json.dumps(result), flush=True)
