"""Rows of very different length against rows of one length: the same number of real tokens should cost the same.

python -m benchmarks.lengths [--rows 32] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.run import ROOT, write_results
from benchmarks.tiny import make_agent, make_batch, make_model


def main() -> None:
    """Alternate the two kinds of batch, print their ratio, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/lengths.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    span = options.longest - options.shortest
    uneven = [options.shortest + round(span * i / (options.rows - 1)) for i in range(options.rows)]
    equal = [sum(uneven) // options.rows] * options.rows
    agent = make_agent(make_model(), batch_size=options.rows, micro_batch_size_per_gpu=None)
    batches = {"uneven": make_batch(uneven), "equal": make_batch(equal)}
    seconds: dict[str, list[float]] = {"uneven": [], "equal": []}
    for repeat in range(options.repeats + 1):
        for kind, batch in batches.items():
            began = clock()
            agent.learn(batch)
            if repeat:
                seconds[kind].append((clock() - began) / int(batch["attention_mask"].sum()))
    cost = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratio = cost["uneven"] / cost["equal"]
    print(f"seconds per token: {cost['uneven']:.3g} uneven, {cost['equal']:.3g} equal; ratio {ratio:.3f}")
    write_results(options.output, seconds_per_token=seconds, ratio=ratio)


if __name__ == "__main__":
    main()
