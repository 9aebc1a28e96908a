"""Peak memory of `SFT.test` against the number of rows: it should not grow.

python -m benchmarks.evaluation_memory [--rows 200 2000] [--vocabulary 50000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.memory import peak_bytes
from benchmarks.run import ROOT, table, write_results


def evaluate(start: Callable[[], None], rows: int, vocabulary: int, length: int) -> None:
    """Evaluate that many rows once, after a first batch that fills caches."""
    import torch

    from benchmarks.tiny import make_agent, make_batch, make_model

    class Rows:
        """The part of an environment that `test` needs: the same few rows, as often as asked."""

        def __init__(self, count: int):
            self.batches = count // 8

        def test_batches(self, rows_per_batch=None, limit=None):
            return (make_batch([length] * 8, vocabulary=vocabulary, seed=i) for i in range(limit or self.batches))

    torch.set_num_threads(1)
    agent = make_agent(make_model(vocabulary=vocabulary, hidden=64, layers=1))
    agent.test(Rows(16), loop=None)
    start()
    agent.test(Rows(rows), loop=None)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/evaluation_memory.json")
    options = parser.parse_args()
    results = {rows: peak_bytes(evaluate, rows, options.vocabulary, options.length) for rows in options.rows}
    logits = {rows: rows * options.length * options.vocabulary * 4 for rows in options.rows}
    lines = [[f"{rows}", f"{peak / 2**20:.1f}", f"{logits[rows] / 2**20:.0f}"] for rows, peak in results.items()]
    print(table(["rows", "growth of the peak, MiB", "their logits would take, MiB"], lines))
    write_results(options.output, bytes=results)


if __name__ == "__main__":
    main()
