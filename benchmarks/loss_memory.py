"""Memory of the loss alone, forward and backward: this package's against full logits.

    python -m benchmarks.loss_memory [--vocabulary 150000] [--positions 2048] [--share 0.1] [--hidden 64]

The full way projects all positions, as `labels=` of a model does. The head is frozen, as with LoRA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.memory import peak_bytes
from benchmarks.run import ROOT, table, write_results


def _inputs(
    vocabulary: int, positions: int, share: float, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(positions, size).requires_grad_()
    weight = torch.randn(vocabulary, size) * 0.02
    labels = torch.where(torch.rand(positions) < share, torch.randint(0, vocabulary, (positions,)), -100)
    return hidden, weight, labels


def full(start: Callable[[], None], *sizes: float) -> None:
    """Logits of all positions at once."""
    hidden, weight, labels = _inputs(*sizes)  # type: ignore[arg-type]
    start()
    F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=-100, reduction="sum").backward()


def ours(start: Callable[[], None], *sizes: float) -> None:
    """Hidden states at targets, the head in chunks."""
    from agilerl.losses import linear_cross_entropy
    from agilerl.models.head import Head

    hidden, weight, labels = _inputs(*sizes)  # type: ignore[arg-type]
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    module.weight.data = weight
    head, chosen = Head(module), labels != -100
    start()
    linear_cross_entropy(hidden[chosen], head, labels[chosen], torch.ones(int(chosen.sum()))).total.backward()


def main() -> None:
    """Measure a few lengths, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--share", type=float, default=0.1, help="of the positions that are targets")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/loss_memory.json")
    options = parser.parse_args()
    results = []
    for positions in options.positions:
        sizes = (options.vocabulary, positions, options.share, options.hidden)
        results.append({"positions": positions, "ours": peak_bytes(ours, *sizes), "full": peak_bytes(full, *sizes)})
    rows = [
        [f"{r['positions']}", f"{r['ours'] / 2**20:.0f}", f"{r['full'] / 2**20:.0f}", f"{r['full'] / r['ours']:.1f}"]
        for r in results
    ]
    print(table(["positions", "ours, MiB", "full logits, MiB", "ratio"], rows))
    write_results(options.output, vocabulary=options.vocabulary, share=options.share, results=results)


if __name__ == "__main__":
    main()
