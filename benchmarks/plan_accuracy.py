"""How far `agilerl plan` is from the measured peak memory, for several ways to train SmolLM2-135M on a CPU.

    python benchmarks/plan_accuracy.py            # measure every case in a fresh process, print a table
    python benchmarks/plan_accuracy.py --case 3   # one case in this process, as JSON

Measured: highest resident memory during loading and three training steps, minus resident memory after the imports. The
last case maps freed memory back to the system (see docs/distributed.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

CASES: list[dict] = [
    {"lora": True, "checkpointing": True, "rows": 4, "length": 128},
    {"lora": True, "checkpointing": False, "rows": 4, "length": 128},
    {"lora": True, "checkpointing": False, "rows": 2, "length": 512},
    {"lora": False, "checkpointing": True, "rows": 4, "length": 128},
    {"lora": False, "checkpointing": False, "rows": 2, "length": 128},
    {"lora": True, "checkpointing": True, "rows": 4, "length": 512},
    {"lora": True, "checkpointing": True, "rows": 2, "length": 64, "dtype": "bfloat16"},
    {"lora": True, "checkpointing": True, "rows": 4, "length": 512, "returned": True},
]
RETURNED = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


def resident(field: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure(case: dict) -> dict:
    """Train two steps of one case and compare."""
    import torch
    from peft import LoraConfig

    from agilerl.algorithms.sft import SFT
    from agilerl.distributed.plan import Workload, estimate
    from agilerl.models.build import resolve_name

    folder = resolve_name("smollm2-135m")
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark here
    before = resident("VmRSS")
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if case["lora"] else None
    agent = SFT(
        0,
        "<pad>",
        model_name=folder,
        model_config={"dtype": getattr(torch, case.get("dtype", "float32"))},
        lora_config=config,
        gradient_checkpointing=case["checkpointing"],
        batch_size=case["rows"],
        micro_batch_size_per_gpu=case["rows"],
    )
    loaded = resident("VmHWM") - before
    ids = torch.randint(10, 40_000, (case["rows"], case["length"]), generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "prompt_lengths": [case["length"] // 2] * case["rows"],
    }
    for _ in range(3):
        agent.learn(batch)
    peak = resident("VmHWM") - before
    workload = Workload(
        tokens=case["rows"] * case["length"], targets=case["rows"] * case["length"] // 2, longest=case["length"]
    )
    plan = estimate(
        folder, config, workload, dtype=case.get("dtype", "float32"), gradient_checkpointing=case["checkpointing"]
    )
    return {
        "case": case,
        "path": agent.packing[0],
        "loaded_mib": loaded / 2**20,
        "peak_mib": peak / 2**20,
        "planned_mib": plan.peak_bytes / 2**20,
        "parts_mib": {name: round(size / 2**20, 1) for name, size in plan.parts.items()},
    }


def main() -> None:
    """Run one case here, or every case in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int)
    chosen = parser.parse_args().case
    if chosen is not None:
        print(json.dumps(measure(CASES[chosen])))
        return
    print("| trained | blocks | rows x tokens | measured MiB | planned MiB | error |")
    print("|---|---|---|---|---|---|")
    for index, case in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(index)]
        environment = os.environ | (RETURNED if case.get("returned") else {})
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        got = json.loads(done.stdout.splitlines()[-1])
        what = ("LoRA" if case["lora"] else "all weights") + (", bfloat16" if "dtype" in case else "")
        what += ", freed memory returned" if case.get("returned") else ""
        blocks = "recomputed" if case["checkpointing"] else "kept"
        error = got["planned_mib"] / got["peak_mib"] - 1
        sizes = f"{got['peak_mib']:,.0f} | {got['planned_mib']:,.0f} | {error:+.0%}"
        print(f"| {what} | {blocks} | {case['rows']} x {case['length']} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
