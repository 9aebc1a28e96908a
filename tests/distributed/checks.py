"""What each rank runs in one launch; every check returns plain values, which the tests compare with one process."""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agilerl.algorithms.sft import SFT
from agilerl.distributed import FSDPConfig, make_runtime
from agilerl.distributed.shards import is_sharded, local
from agilerl.errors import ConfigError, NonFiniteError, UnsupportedError
from tests.distributed import scenarios
from tests.distributed.scenarios import PRECISE, SHARD_ALL, batch_of, global_batches, make_agent, train, trained
from tests.helpers import tiny_model

ALL = SHARD_ALL | PRECISE


def check_collectives(_: Path) -> Any:
    runtime = make_runtime("cpu")
    rank, world = runtime.rank, runtime.world_size
    return {
        "sum": runtime.sum([1.0, rank]),
        "max": runtime.max([rank, -rank]),
        "nan_wins": math.isnan(runtime.max([math.nan if rank == 0 else 1.0])[0]),
        "any": [runtime.any(rank == world - 1), runtime.any(False)],
        "broadcast": runtime.broadcast({"from": rank}),
        "main": runtime.broadcast(runtime.is_main),
    }


def check_replicas_start_from_rank_0(_: Path) -> Any:
    """Each rank brings other weights and other frozen weights; afterwards all have rank 0's."""
    rank, _world = scenarios.here()
    model = tiny_model("llama", seed=rank)
    model.model.embed_tokens.weight.requires_grad_(False)
    runtime = make_runtime("cpu")
    runtime.prepare(model, gradient_checkpointing=False)
    reference = tiny_model("llama", seed=0)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    return not runtime.any(not same)


def check_non_finite_raises_everywhere(_: Path) -> Any:
    """One rank's weights are broken (as a bad read would do); every rank refuses the step and keeps its weights."""
    raised = []
    for fields in (None, ALL):
        agent = make_agent(fsdp=fields)
        before = {n: local(p).clone() for n, p in agent.actor.named_parameters() if p.requires_grad}
        if agent.runtime.rank == 1:
            victim = next(p for n, p in agent.actor.named_parameters() if "lora_A" in n and local(p).numel())
            name = next(n for n, p in agent.actor.named_parameters() if p is victim)
            with torch.no_grad():
                local(victim).fill_(math.nan)
            before.pop(name)
        try:
            agent.learn(batch_of(global_batches()[0], agent.runtime.dp_rank, agent.runtime.dp_size))
            raised.append("no error")
        except NonFiniteError as error:
            raised.append(type(error).__name__)
        held = dict(agent.actor.named_parameters())
        assert all(torch.equal(local(held[name]), value) for name, value in before.items())
    every = make_runtime("cpu").max([float("no error" in raised)])[0]
    return {"raised": raised, "everywhere": every == 0}


def check_skeleton(folder: Path) -> Any:
    """A model loaded by slices is the model loaded whole: weights, buffers, fingerprint, adapters, training."""
    found = {}
    for kind in ("plain", "tied"):
        name = str(folder / kind)
        agent = make_agent(fsdp=ALL, folder=name)
        assert any(is_sharded(p) for p in agent.actor.parameters())
        found[kind] = {
            "was_skeleton": len(agent.runtime._files) == 1,
            "weights": agent.runtime.collect(dict(agent.actor.named_parameters())),
            "buffers": {n: b.clone() for n, b in agent.actor.named_buffers()},
            "fingerprint": agent._resources.base["fingerprint"],
            "packing": agent.packing[0],
            "run": train(agent),
        }
    return found


def check_skeleton_full(folder: Path) -> Any:
    agent = make_agent(fsdp=ALL, folder=str(folder / "tied"), lora=False)
    return train(agent)


def check_save_fsdp(folder: Path) -> Any:
    """Train two steps, save, train on: the tests resume from this elsewhere."""
    batches = global_batches()
    found = {}
    for kind in ("lora", "full"):
        agent = make_agent(fsdp=ALL, folder=str(folder / "plain"), lora=kind == "lora")
        train(agent, batches[:2])
        agent.save_checkpoint(folder / f"saved_{kind}")
        agent.save_checkpoint(folder / f"state_{kind}", lora_only=False)
        snapshot = agent.snapshot_checkpoint()
        found[kind] = train(agent, batches[2:])
        if agent.runtime.is_main:
            snapshot.write(folder / f"snapshot_{kind}")
    return found


def check_resume(folder: Path) -> Any:
    """What the ranks saved is continued by DDP and by FSDP2, from either form."""
    found = {}
    for kind in ("lora", "full"):
        for form in ("saved", "state", "snapshot"):
            for layout, fields in (("ddp", None), ("fsdp", ALL | {"param_persistence_threshold": 500})):
                agent = make_agent(fsdp=fields, folder=str(folder / "plain"), lora=kind == "lora", lr=1.0)
                agent.load_checkpoint(folder / f"{form}_{kind}", load_optimizer=True)
                found[f"{kind}/{form}/{layout}"] = train(agent, global_batches()[2:])
    return found


def check_clones(folder: Path) -> Any:
    """A clone shares the frozen shards, continues as its parent, and does not disturb it."""
    found = {}
    for kind in ("lora", "full"):
        agent = make_agent(fsdp=ALL, folder=str(folder / "tied"), lora=kind == "lora")
        train(agent, global_batches()[:2])
        twin = agent.clone(index=1)
        mine, theirs = dict(agent.actor.named_parameters()), dict(twin.actor.named_parameters())
        frozen = [n for n, p in mine.items() if not p.requires_grad]
        shared = all(local(mine[n]).data_ptr() == local(theirs[n]).data_ptr() for n in frozen)
        own = all(
            local(mine[n]).data_ptr() != local(theirs[n]).data_ptr() or not local(mine[n]).numel()
            for n, p in mine.items()
            if p.requires_grad
        )
        before = trained(agent)
        run = train(twin, global_batches()[2:])
        after = trained(agent)
        found[kind] = {
            "shared": shared,
            "own": own,
            "names": list(mine) == list(theirs),
            "parent_unchanged": all(torch.equal(before[n], after[n]) for n in before),
            "twin": run,
            "parent": train(agent, global_batches()[2:]),
        }
    return found


def check_unwrap(folder: Path) -> Any:
    """Unwrapped, a sharded model is an ordinary whole one; wrapped again it continues."""
    agent = make_agent(fsdp=ALL, folder=str(folder / "plain"))
    train(agent, global_batches()[:2])
    agent.unwrap_models()
    whole = not any(is_sharded(p) for p in agent.actor.parameters())
    logits = agent.actor.eval()(input_ids=torch.arange(8)[None]).logits
    agent.wrap_models()
    return {"whole": whole, "logits": logits.detach(), "run": train(agent, global_batches()[2:])}


def check_ordinary_model(folder: Path) -> Any:
    """The sharded actor is called, evaluated and generates like any model; nothing stale is left behind."""
    agent = make_agent(fsdp=ALL | {"reshard_after_forward": False}, folder=str(folder / "tied"))
    ids = torch.arange(3, 11)[None]
    first = agent.actor.eval()(input_ids=ids, labels=ids)
    train(agent, global_batches()[:2])
    with torch.no_grad():
        second = agent.actor.eval()(input_ids=ids, labels=ids)
        new = agent.actor.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    runtime = agent.runtime
    sums = agent._evaluate(batch_of(global_batches()[1], runtime.dp_rank, runtime.dp_size))
    return {
        "logits": [first.logits.detach(), second.logits],
        "generated": new,
        "loss": sums.mean("loss", "weight"),
    }


def check_mixed_precision(folder: Path) -> Any:
    """Defaults: bfloat16 compute, float32 reduction and shards."""
    found = {}
    for kind in ("lora", "full"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            agent = make_agent(fsdp={}, dtype="float32", lora=kind == "lora", lr=1e-3)
        run = train(agent)
        dtypes = {str(p.dtype) for p in agent.actor.parameters() if p.requires_grad}
        found[kind] = {"metrics": run["metrics"], "dtypes": sorted(dtypes)}
    agent = make_agent(fsdp=SHARD_ALL, dtype="bfloat16", lora=False, lr=1e-3)
    found["bfloat16"] = {"metrics": train(agent)["metrics"]}
    return found


def check_tensor_parallel(_: Path) -> Any:
    """Every rank splits the same matrices; with two ranks there is one share of the rows."""
    found = {}
    for family in ("llama", "qwen2", "qwen3", "gemma2"):
        for kind in ("lora", "full"):
            agent = make_agent(family=family, lora=kind == "lora", fsdp=ALL | {"tp": 2})
            split = sum(1 for p in agent.actor.parameters() if "tp" in (_names(p)))
            assert split, "nothing is split"
            found[f"{family}/{kind}"] = train(agent)
    return found


def _names(parameter: nn.Parameter) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names if is_sharded(parameter) else ()


def check_refusals(_: Path) -> Any:
    """Layouts that do not fit are refused with a sentence on every rank."""
    _rank, world = scenarios.here()
    with pytest.raises(ConfigError, match="does not divide"):
        make_runtime("cpu", FSDPConfig(tp=world + 1))
    with pytest.raises(ConfigError, match="shard_group_size"):
        make_runtime("cpu", FSDPConfig(shard_group_size=world + 1))
    runtime = make_runtime("cpu", FSDPConfig(tp=2))
    with pytest.raises(UnsupportedError, match="no plan for 'gpt2'"):
        runtime.prepare(tiny_model("gpt2"), gradient_checkpointing=False)
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        runtime.prepare(tiny_model("llama", num_key_value_heads=1), gradient_checkpointing=False)
    with pytest.raises(UnsupportedError, match="DoRA"):
        make_agent_with_dora()
    return True


def make_agent_with_dora() -> SFT:
    from peft import LoraConfig

    return SFT(
        0,
        "<pad>",
        actor_network=tiny_model("llama"),
        lora_config=LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        fsdp_config=FSDPConfig(tp=2),
        batch_size=4,
    )


def check_scenarios(_: Path) -> Any:
    return {
        f"{scenario}/{layout}": scenarios.run_scenario(scenario, layout)
        for scenario in scenarios.SCENARIOS
        for layout in scenarios.LAYOUTS
    }


def check_dpo(_: Path) -> Any:
    runs = [(layout, "sigmoid") for layout in ("ddp", "fsdp")] + [("ddp", name) for name in scenarios.PREFERENCES]
    return {f"{name}/{layout}": scenarios.run_dpo(layout, name) for layout, name in runs}


def check_pictures(_: Path) -> Any:
    """Only one rank has rows with images."""
    return {
        f"{scenario}/{layout}": scenarios.run_pictures(scenario, layout)
        for scenario in scenarios.PICTURED
        for layout in ("ddp", "fsdp")
    }


def check_grids(_: Path) -> Any:
    """Four ranks: replicas of shards, and matrices split as well."""
    found = {}
    for name, fields in {
        "hybrid": {"shard_group_size": 2},
        "tp2": {"tp": 2},
        "tp2_replicated": {"tp": 2, "shard_group_size": 1},
    }.items():
        for family in ("llama", "qwen2"):
            for kind in ("lora", "full"):
                agent = make_agent(family=family, lora=kind == "lora", fsdp=ALL | fields)
                found[f"{name}/{family}/{kind}"] = train(agent)
    return found


TWO = (
    "collectives",
    "replicas_start_from_rank_0",
    "non_finite_raises_everywhere",
    "scenarios",
    "dpo",
    "pictures",
    "skeleton",
    "skeleton_full",
    "save_fsdp",
    "resume",
    "clones",
    "unwrap",
    "ordinary_model",
    "mixed_precision",
    "tensor_parallel",
    "refusals",
)
FOUR = ("collectives", "scenarios", "skeleton", "resume", "grids")


def main(folder: Path, names: list[str]) -> None:
    """Run the named checks; rank 0 keeps what each returned, or how it failed, in ``folder``."""
    warnings.simplefilter("error")
    rank, _world = scenarios.here()
    for name in names:
        result: dict[str, Any]
        try:
            result = {"value": globals()[f"check_{name}"](folder)}
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{name}.rank{rank}.pt")
        if "error" in result:  # the ranks are out of step now
            raise SystemExit(result["error"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
