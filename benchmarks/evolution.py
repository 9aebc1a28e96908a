"""What a population costs in memory: four agents on one frozen base against one agent.

    python benchmarks/evolution.py [model]

Each case runs in a fresh process and reports its peak resident memory minus what the process held after the imports,
before any training. The aim is a ratio under 1.25 with LoRA on the default model, SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

POPULATION = 4
LIMIT = 1.25


def measure(model: str, size: int) -> dict[str, float]:
    """Build a population in this process and return memory in MiB."""
    from peft import LoraConfig

    from agilerl.algorithms import SFT
    from agilerl.metrics.throughput import peak_memory_gib, resident_memory_gib
    from agilerl.models.presets import is_preset, load_preset_folder

    name = str(load_preset_folder(model)) if is_preset(model) else model  # converting is no part of the case
    before = resident_memory_gib()
    agents = SFT.population(
        size,
        pad_token_id=0,
        pad_token="<pad>",
        model_name=name,
        lora_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    peak = peak_memory_gib()
    if before is None or peak is None:
        raise SystemExit("This system does not tell the memory of a process.")
    owned = sum(p.numel() * p.element_size() for p in agents[-1].actor.parameters() if p.requires_grad)
    return {"peak_mib": 1024 * (peak - before), "own_mib_per_agent": owned / 2**20}


def main() -> None:
    """Run both cases and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size is not None:
        print(json.dumps(measure(arguments.model, arguments.size)))
        return
    results = {}
    for size in (1, POPULATION):
        command = [sys.executable, __file__, arguments.model, "--size", str(size)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        results[size] = json.loads(line)
    ratio = results[POPULATION]["peak_mib"] / results[1]["peak_mib"]
    print(json.dumps({"one": results[1], "four": results[POPULATION], "ratio": round(ratio, 4), "limit": LIMIT}))
    if ratio >= LIMIT:
        raise SystemExit(f"A population of {POPULATION} takes {ratio:.2f} times one agent; the limit is {LIMIT}.")


if __name__ == "__main__":
    main()
