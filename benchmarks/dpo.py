"""Speed and memory of DPO: shared prompts, separate rows, and, where its environment exists, TRL.

    python -m benchmarks.dpo [--pairs 200] [--parts 5] [--peer-parts 5] [--subjects dpo-shared dpo-separate dpo-trl]

All take the same pairs (prompts as long as both answers together), LoRA settings, batch and micro-batch. The pairs come in
parts, and the subjects take turns at each part, so that a machine whose speed drifts is the same for all. Rates count every
token of both rows of a pair, over all parts, so that they compare time for the same work. A slow peer may take the first few
parts only; ratios are always over the parts that both took.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import make_pairs
from benchmarks.run import ROOT, SUBJECTS, available, measure, median, model_folder, table, write_jsonl, write_results
from benchmarks.subjects.job import Job

_SUBJECTS = ["dpo-shared", "dpo-separate", "dpo-trl"]
_HEADER = [
    "subject",
    "tokens/s",
    "tokens per CPU second",
    "shared is x times",
    "peak GB",
    "shared is x of it",
    "first loss",
]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a folder or a preset")
    parser.add_argument("--subjects", nargs="+", default=_SUBJECTS, choices=_SUBJECTS)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--peer-parts", type=int, default=5, help="parts that other packages take")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/dpo.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, write everything as JSON."""
    options = _arguments()
    subjects = [subject for subject in options.subjects if available(subject)]
    for subject in set(options.subjects) - set(subjects):
        print(f"{subject} is left out: run benchmarks/peers/setup trl first")
    results: dict[str, list[dict[str, Any]]] = {subject: [] for subject in subjects}
    steps = max(1, options.pairs // options.parts // options.batch_size)
    size = (1 + steps) * options.batch_size  # the first batch of a part is not timed
    pairs = make_pairs(size * options.parts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        job = Job(
            model=model_folder(options.model),
            rows=str(path),
            dtype=options.dtype,
            checkpointing=options.checkpointing,
            batch_size=options.batch_size,
            micro_batch_size=options.micro_batch_size,
            threads=options.threads,
            warm_up=1,
            steps=steps,
            dropout=0.0,
        )
        for part in range(options.parts):
            rows = pairs[part * size : (part + 1) * size]
            write_jsonl(path, rows)
            for subject in subjects:
                if part < options.peer_parts or SUBJECTS[subject][1] is None:
                    results[subject].append(measure(subject, job))
            print(f"\n{(part + 1) * steps * options.batch_size} pairs\n")
            print(table(_HEADER, _lines(results, one_thread=options.threads == 1)), flush=True)
            write_results(options.output, results=results)


def _lines(results: dict[str, list[dict[str, Any]]], *, one_thread: bool) -> list[list[str]]:
    # With one thread the processor time is the better clock: it leaves out what other processes take.
    clock = "tokens_per_cpu_s" if one_thread else "tokens_per_s"
    lines = []
    for subject, found in results.items():
        shared = results.get("dpo-shared", [])[: len(found)]
        speed, memory = _rate(shared, clock), median(shared, "peak_gb")
        rate, peak = _rate(found, clock), median(found, "peak_gb")
        if rate is None or peak is None:
            lines.append([subject, "not measured" if not found else found[-1].get("error", "?"), "", "", "", "", ""])
            continue
        ratios = [f"{speed / rate:.2f}" if speed else "", f"{memory / peak:.2f}" if memory else ""]
        shown = [f"{_rate(found, name):.0f}" for name in ("tokens_per_s", "tokens_per_cpu_s")]
        lines.append([subject, *shown, ratios[0], f"{peak:.2f}", ratios[1], f"{found[-1]['losses'][0]:.5f}"])
    return lines


def _rate(parts: list[dict[str, Any]], clock: str) -> float | None:
    """Tokens of all parts over their time; None where one failed."""
    if not parts or any(clock not in part for part in parts):
        return None
    return sum(part["tokens"] for part in parts) / sum(part["tokens"] / part[clock] for part in parts)


if __name__ == "__main__":
    main()
