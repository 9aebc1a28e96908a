"""Memory of LoRA on routed experts, forward and backward: this package's grouped products against PEFT's dense deltas.

    python -m benchmarks.expert_memory [--experts 64] [--hidden 256] [--intermediate 512] [--tokens 256] [--rank 8] [--layers 1]

Blocks of a Mixtral-like model with packed experts, the base frozen; peaks are counted above the model and its adapters. PEFT
adds B A to the stack of all experts, so its peak grows with their number; grouped products work on the tokens of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from benchmarks.run import ROOT, table, write_results


def _model(experts: int, hidden: int, intermediate: int, rank: int, layers: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=parameters))


def _step(model: Any, tokens: int) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    model.train()(input_ids=ids).logits.square().mean().backward()


def dense(start: Callable[[], None], tokens: int, *sizes: int) -> None:
    """PEFT's own path."""
    model = _model(*sizes)
    start()
    _step(model, tokens)


def grouped(start: Callable[[], None], tokens: int, *sizes: int, recompute: bool = True) -> None:
    """The same model with its experts' adapters computed by groups of tokens; the probe at the start counts, too."""
    from agilerl.models import moe

    model = _model(*sizes)
    start()
    if moe.install(model, recompute=recompute) != sizes[-1]:
        raise RuntimeError("the experts were not taken over")
    _step(model, tokens)


def kept(start: Callable[[], None], tokens: int, *sizes: int) -> None:
    """The grouped path without recomputing the experts' activations."""
    grouped(start, tokens, *sizes, recompute=False)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/expert_memory.json")
    options = parser.parse_args()
    results = []
    for experts in options.experts:
        sizes = (options.tokens, experts, options.hidden, options.intermediate, options.rank, options.layers)
        peaks = {way.__name__: peak_bytes(way, *sizes) for way in (dense, grouped, kept)}
        results.append({"experts": experts, **peaks, "ratio": peaks["grouped"] / peaks["dense"]})
    mib = 2**20
    rows = [
        [
            f"{r['experts']}",
            f"{r['dense'] / mib:.0f}",
            f"{r['grouped'] / mib:.0f}",
            f"{r['kept'] / mib:.0f}",
            f"{r['ratio']:.2f}",
        ]
        for r in results
    ]
    print(table(["experts", "dense deltas, MiB", "grouped, MiB", "without recomputing, MiB", "grouped / dense"], rows))
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "experts")}
    write_results(options.output, **settings, results=results)


if __name__ == "__main__":
    main()
