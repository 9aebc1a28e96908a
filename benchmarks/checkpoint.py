"""Saving while training: how long a save holds up the step loop, and how much the write slows the steps.

    python -m benchmarks.checkpoint [--model smollm2-135m] [--rows 4] [--length 64] [--repeats 3]

All weights are trained, so a checkpoint holds the model and both moments. Memory of the first snapshot is new; the later
ones reuse it, as a training run does, and those are what is reported.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import ROOT, model_folder, table, write_results


def _agent(model: str) -> Any:
    from agilerl.algorithms.sft import SFT

    # A rate that changes nothing to speak of: the values do not matter here, and must stay finite.
    return SFT(0, "<pad>", model_name=model_folder(model), model_config={"dtype": "float32"}, lr=1e-9, batch_size=64)


def _batch(agent: Any, rows: int, length: int) -> dict[str, Any]:
    ids = torch.randint(5, agent.actor.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lengths": [length // 2] * rows}


def _timed(work: Any, *args: Any) -> float:
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def measure(model: str, rows: int, length: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Steps alone, synchronous saves, and background saves with the steps beside them."""
    from agilerl.checkpoint import BackgroundWriter, CheckpointFolder, HostBuffers, LLMCheckpointSnapshot

    agent = _agent(model)
    batch = _batch(agent, rows, length)
    place, writer, buffers = CheckpointFolder(folder, keep_last=1, keep_best=0), BackgroundWriter(), HostBuffers()
    for _ in range(2):
        agent.learn(batch)

    saves = [_timed(lambda: place.save(agent._capture(), step=0)) for _ in range(repeats)]
    alone, beside, blocked, written = [], [], [], []
    for repeat in range(repeats + 1):
        # Steps alone are measured beside each save, so that a busy machine slows both sides alike.
        alone += [_timed(agent.learn, batch) for _ in range(4)]
        begin = time.perf_counter()
        snapshot = LLMCheckpointSnapshot.of(agent._capture(), buffers)
        writer.submit(snapshot, place, step=repeat + 1)
        held = time.perf_counter() - begin
        while writer.is_busy:
            took = _timed(agent.learn, batch)
            if repeat and writer.is_busy:  # a step that outlasts the write is only partly beside it
                beside.append(took)
        writer.wait()
        if repeat:
            blocked.append(held)
            written.append(time.perf_counter() - begin)
    size = sum(path.stat().st_size for path in (folder / ".versions").rglob("*") if path.is_file())
    median = statistics.median
    return {
        "checkpoint_gib": size / 2**30,
        "synchronous_save_s": median(saves),
        "blocked_s": median(blocked),
        "blocked_share": median(blocked) / median(saves),
        "written_after_s": median(written),
        "step_s": median(alone),
        "step_beside_write_s": median(beside),
        "steps_beside_write": len(beside),
        "slowdown": median(beside) / median(alone) - 1,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/checkpoint.json")
    parser.add_argument("--threads", type=int, default=1, help="of the steps; the writer wants a core of its own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.model, options.rows, options.length, options.repeats, Path(folder) / "out")
    rows = [
        ["checkpoint", f"{result['checkpoint_gib']:.2f} GiB"],
        ["synchronous save", f"{result['synchronous_save_s']:.2f} s"],
        ["step loop held up by a background save", f"{result['blocked_s']:.2f} s ({result['blocked_share']:.1%})"],
        ["on the disk after", f"{result['written_after_s']:.2f} s"],
        ["step alone", f"{result['step_s']:.2f} s"],
        ["step beside the write", f"{result['step_beside_write_s']:.2f} s ({result['slowdown']:+.1%})"],
    ]
    print(table(["what", "measured"], rows))
    write_results(options.output, **result)


if __name__ == "__main__":
    main()
