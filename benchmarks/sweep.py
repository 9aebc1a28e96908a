"""Tokens per second and memory against length, micro-batch, vocabulary and number of agents, on a small model.

python -m benchmarks.sweep [--only length micro_batch vocabulary agents]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import peak_bytes
from benchmarks.run import ROOT, table, write_results

_SWEEPS: dict[str, list[int]] = {
    "length": [64, 256, 1024],
    "micro_batch": [1, 4, 16],
    "vocabulary": [4_096, 32_768, 131_072],
    "agents": [1, 2, 4],
}


def train(start: Callable[[], None], path: str, axis: str, value: int) -> None:
    """One warm step and one timed step of every agent; the rate goes to `path`."""
    import torch

    from benchmarks.tiny import make_agent, make_batch, make_model

    torch.set_num_threads(1)
    length = value if axis == "length" else 256
    vocabulary = value if axis == "vocabulary" else 4_096
    rows = max(1, 4_096 // length)
    micro = value if axis == "micro_batch" else None
    batch = make_batch([length] * rows, vocabulary=vocabulary)
    model = make_model(vocabulary=vocabulary)
    start()
    agent = make_agent(model, batch_size=rows, micro_batch_size_per_gpu=micro)
    agents = [agent, *(agent.clone(index=i) for i in range(1, value if axis == "agents" else 1))]
    for member in agents:
        member.learn(batch)
    began = time.thread_time()
    for member in agents:
        member.learn(batch)
    rate = rows * length * len(agents) / (time.thread_time() - began)
    Path(path).write_text(json.dumps(rate), encoding="utf-8")


def main() -> None:
    """Measure every point in a process of its own, print one table per axis, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(_SWEEPS), choices=list(_SWEEPS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/sweep.json")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rate_file = options.output.with_suffix(".rate")
    report: dict[str, list[dict[str, Any]]] = {}
    for axis in options.only:
        report[axis] = []
        for value in _SWEEPS[axis]:
            peak = peak_bytes(train, str(rate_file), axis, value)
            rate = json.loads(rate_file.read_text(encoding="utf-8"))
            report[axis].append({"value": value, "tokens_per_cpu_s": rate, "peak_bytes_above_model": peak})
        lines = [
            [f"{r['value']}", f"{r['tokens_per_cpu_s']:.0f}", f"{r['peak_bytes_above_model'] / 2**20:.0f}"]
            for r in report[axis]
        ]
        print(
            table([axis.replace("_", " "), "tokens per CPU second", "peak above the model, MiB"], lines) + "\n",
            flush=True,
        )
        write_results(options.output, one_thread=True, **report)
    rate_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
