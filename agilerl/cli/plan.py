"""``agilerl plan``: will this run fit, and how long does a step take?"""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agilerl.cli.words import Data, Model, Words, options_of, quiet_libraries
from agilerl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from agilerl.config.schema import RunConfig
    from agilerl.distributed.plan import Plan, Workload

__all__ = ["command"]

Procs = Annotated[int, typer.Option("--procs", min=1, help="Processes that share the run.")]
Memory = Annotated[
    float | None, typer.Option("--memory", help="GiB of each process; nothing: this machine's.", show_default=False)
]
Tflops = Annotated[
    float | None,
    typer.Option("--tflops", help="Sustained TFLOP/s of each process; nothing: measured here.", show_default=False),
]
Tokens = Annotated[
    int | None,
    typer.Option("--longest", help="Tokens of the longest row; nothing: reads the data.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else.")]

MIB = 2**20


def command(
    words: Words = None,
    model: Model = None,
    data: Data = None,
    procs: Procs = 1,
    memory: Memory = None,
    tflops: Tflops = None,
    longest: Tokens = None,
    as_json: Json = False,
) -> int:
    """Estimate memory and step time of a run on each process, without loading the model's weights.

    Ends with exit code 1 where the run does not fit, and says what to change.
    """
    quiet_libraries()
    from agilerl.recipes.describe import describe

    config = describe(words or (), options=options_of(model=model, data=data)).loaded.config
    plan, work, device = _plan(config, procs, longest)
    available = memory * 2**30 if memory is not None else _memory_here(device, procs)
    speed = tflops * 1e12 if tflops is not None else _speed_here(device)
    seconds = plan.seconds_per_step(speed)
    fits = plan.peak_bytes <= available
    found = {
        "processes": procs,
        "parts_mib": {name: round(size / MIB, 1) for name, size in plan.parts.items()},
        "load_mib": round(plan.load_bytes / MIB, 1),
        "step_mib": round(plan.step_bytes / MIB, 1),
        "peak_mib": round(plan.peak_bytes / MIB, 1),
        "available_mib": round(available / MIB, 1),
        "fits": fits,
        "micro_batch_tokens": work.tokens,
        "step_seconds": seconds,
        "advice": list(plan.advice) if not fits else [],
    }
    typer.echo(json.dumps(found, allow_nan=False) if as_json else _text(found))
    return 0 if fits else 1


def _plan(config: RunConfig, procs: int, longest: int | None) -> tuple[Plan, Workload, str]:
    from agilerl.distributed.plan import count, plan_of
    from agilerl.recipes.device import pick_device, pick_dtype
    from agilerl.recipes.setup import fsdp_config, starting_point

    config = starting_point(config)
    if config.model.quantization != "none":
        raise ConfigError(
            "agilerl plan does not know quantised models yet: set model.quantization=none for an upper bound."
        )
    device = pick_device(config.model.device)
    network = _network(config)
    sharding = fsdp_config(config)
    ranks = procs // (sharding.tp if sharding is not None else 1)
    work = _workload(config, network, device, max(1, ranks), longest)
    plan = plan_of(
        count(network),
        network.config.get_text_config(),
        work,
        dtype=pick_dtype(config.model.dtype, device),
        gradient_checkpointing=config.sft.gradient_checkpointing,
        fsdp=sharding,
        world_size=procs,
        device="cuda" if device.startswith("cuda") else "cpu",
    )
    return plan, work, device


def _network(config: RunConfig) -> Any:
    """The model of a run with its adapters, without weights."""
    from peft import get_peft_model

    from agilerl.distributed.plan import hollow_model
    from agilerl.models.build import resolve_name
    from agilerl.models.targets import adapt_lora_config_for_model, check_targets
    from agilerl.recipes.open import adapter_settings
    from agilerl.recipes.setup import lora_config

    name = config.model.name
    path = resolve_name(name)
    try:
        network: Any = hollow_model(path, None, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"The settings of the model {name!r} cannot be read ({reason}).") from None
    if config.model.adapter is not None:
        return get_peft_model(network, adapter_settings(config.model.adapter), low_cpu_mem_usage=True)
    lora = lora_config(config.lora)
    if lora is None:
        return network
    lora = adapt_lora_config_for_model(network, lora, config.lora.target_scope)
    check_targets(network, lora)
    return get_peft_model(network, lora, low_cpu_mem_usage=True)


def _workload(config: RunConfig, network: Any, device: str, ranks: int, longest: int | None) -> Workload:
    from agilerl.distributed.plan import Workload
    from agilerl.models.probe import default_token_budget

    section = config.sft
    share = 1.0
    if longest is not None:
        top, mean = longest, float(longest)
    else:
        from agilerl.recipes.setup import build_env, load_tokenizer_for

        env = build_env(config, load_tokenizer_for(config.model), objective="sft")
        report = env.reports["train"]
        top, mean = env.longest, report.tokens / max(1, report.examples)
        share = report.trained_tokens / max(1, report.tokens)
    rows = section.mini_batch_size or math.ceil(section.batch_size / ranks)
    micro_rows = section.micro_batch_size_per_gpu
    if micro_rows is not None:
        tokens = min(micro_rows, rows) * top
    else:
        budget = default_token_budget(network, on_gpu=device.startswith("cuda"))
        tokens = max(top, min(budget, math.ceil(rows * mean)))
    return Workload(tokens, max(1, int(tokens * share)), top, step_tokens=math.ceil(rows * mean))


def _memory_here(device: str, procs: int) -> float:
    """Bytes that a process may take: its GPU's, or its share of the host's free memory."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123 - not a file of the user's
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free / procs


def _speed_here(device: str) -> float:
    """Sustained floating-point operations per second in matrix products of a training step's size."""
    import torch

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    size = 4096 if device.startswith("cuda") else 512
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.3:
        torch.mm(left, right)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        done += 1
    return 0.6 * 2.0 * size**3 * done / (time.perf_counter() - began)


def _text(found: dict[str, Any]) -> str:
    lines = [f"On each of {found['processes']} process(es), in MiB:"]
    lines += [f"  {name:<20}{size:>10,.0f}" for name, size in found["parts_mib"].items() if size >= 0.5]
    lines += [
        f"  {'a training step':<20}{found['step_mib']:>10,.0f}   (micro-batch of {found['micro_batch_tokens']:,} tokens)",
        f"  {'loading':<20}{found['load_mib']:>10,.0f}",
        f"  {'peak':<20}{found['peak_mib']:>10,.0f}   of {found['available_mib']:,.0f} available",
        f"A step takes about {found['step_seconds']:.3g} s.",
    ]
    if found["fits"]:
        lines.append("It fits.")
    else:
        lines.append("It does not fit. Try:")
        lines += [f"  {line}" for line in found["advice"]]
    return "\n".join(lines)
