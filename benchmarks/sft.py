"""Speed and memory of LoRA fine-tuning: this package, a plain loop, and, where their environments exist, two peers.

    python -m benchmarks.sft [--repeats 3] [--dtypes float32 bfloat16] [--subjects ours plain trl agilerl] ...

All subjects take the same rows, LoRA settings, batch and micro-batch. They alternate within one run, so that a busy
machine slows all of them alike: ratios are to be trusted more than rates. The ceiling is measured in between. Peak memory
is that of a process of its own, loading the model included.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.run import ROOT, available, measure, median, model_folder, table, write_results, write_rows
from benchmarks.subjects.job import Job

_SUBJECTS = ["ours", "plain", "trl", "agilerl"]
_HEADER = [
    "subject",
    "tokens/s",
    "tokens per CPU second",
    "trained tokens/s",
    "of ceiling",
    "ours is x times",
    "peak GB",
    "ours is x of it",
    "first loss",
]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a folder or a preset")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--subjects", nargs="+", default=_SUBJECTS, choices=_SUBJECTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that are timed")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/sft.json")
    return parser.parse_args()


def _ceiling(job: Job, results: dict[str, list[dict[str, Any]]]) -> float:
    from transformers import AutoConfig, AutoTokenizer

    from benchmarks.ceiling import ceiling_tokens_per_s

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    encoded = [job.encode(tokenizer, row) for batch in job.batches()[job.warm_up :] for row in batch]
    real = sum(len(prompt) + len(response) for prompt, response in encoded)
    micros = len(encoded) / (job.micro_batch_size or job.batch_size)
    return ceiling_tokens_per_s(
        AutoConfig.from_pretrained(job.model),
        dtype=job.dtype,
        checkpointing=job.checkpointing,
        rows=round(real / micros),
        trained_share=sum(len(response) for _, response in encoded) / real,
        threads=job.threads,
    )


def _lines(results: dict[str, list[dict[str, Any]]], ceiling: float, one_thread: bool) -> list[list[str]]:
    ours = results.get("ours", [])
    # With one thread the processor time is the better clock: it leaves out what other processes take.
    speed = median(ours, "tokens_per_cpu_s" if one_thread else "tokens_per_s")
    memory = median(ours, "peak_gb")
    lines = []
    for subject, found in results.items():
        rate, peak = median(found, "tokens_per_s"), median(found, "peak_gb")
        cpu_rate = median(found, "tokens_per_cpu_s")
        if rate is None or peak is None or cpu_rate is None:
            lines.append([subject, found[-1].get("error", "?"), "", "", "", "", "", "", ""])
            continue
        lines.append([
            subject,
            f"{rate:.0f}",
            f"{cpu_rate:.0f}",
            f"{median(found, 'trained_tokens_per_s'):.0f}",
            f"{(cpu_rate if one_thread else rate) / ceiling:.0%}",
            f"{speed / (cpu_rate if one_thread else rate):.2f}" if speed else "",
            f"{peak:.2f}",
            f"{memory / peak:.2f}" if memory else "",
            f"{found[-1]['losses'][0]:.4f}",
        ])  # fmt: skip
    return lines


def main() -> None:
    """Measure, print one table per setting, write everything as JSON."""
    options = _arguments()
    subjects = [subject for subject in options.subjects if available(subject)]
    for subject in set(options.subjects) - set(subjects):
        print(f"{subject} is left out: run benchmarks/peers/setup {subject} first")
    report: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder), options.batch_size * (options.steps + options.warm_up))
        for dtype in options.dtypes:
            for checkpointing in options.checkpointing:
                job = Job(
                    model=model_folder(options.model),
                    rows=str(rows),
                    dtype=dtype,
                    checkpointing=checkpointing == "on",
                    batch_size=options.batch_size,
                    micro_batch_size=options.micro_batch_size,
                    threads=options.threads,
                    warm_up=options.warm_up,
                    steps=options.steps,
                )
                results: dict[str, list[dict[str, Any]]] = {subject: [] for subject in subjects}
                ceilings: list[float] = []
                for _ in range(options.repeats):
                    ceilings.append(_ceiling(job, results))
                    for subject in subjects:
                        results[subject].append(measure(subject, job))
                ceiling = sorted(ceilings)[len(ceilings) // 2]
                print(f"\n{dtype}, checkpointing {checkpointing}, ceiling {ceiling:.0f} tokens/s\n")
                print(table(_HEADER, _lines(results, ceiling, job.threads == 1)), flush=True)
                report.append({
                    "dtype": dtype, "checkpointing": checkpointing, "ceilings": ceilings, "results": results,
                })  # fmt: skip
                write_results(options.output, settings=report)
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
