"""Memory of each rank while a sharded model is loaded by slices: below base / ranks plus one block.

    torchrun --nproc-per-node 2 benchmarks/fsdp_memory.py

Makes a random Llama of about 1.1 GB on disk, then loads and shards it. Measured is the private memory of the process
(pages of mapped files are shared with everyone and can be dropped), sampled every few milliseconds, minus that before.
What lies outside the blocks is shared as well, so the bound needs no exception for a large embedding.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agilerl.distributed import FSDPConfig, make_runtime

MIB = 2**20


def private_bytes() -> int:
    """Anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class Sampler(threading.Thread):
    """Keeps the highest value seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.highest = max(self.highest, private_bytes())


def main() -> None:
    """Load, measure, tell; every rank must stay below the bound."""
    runtime = make_runtime("cpu", FSDPConfig(param_dtype="float32", param_persistence_threshold=0))
    folder = None
    if runtime.is_main:
        folder = tempfile.mkdtemp()
        config = LlamaConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16, vocab_size=32_000
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    folder = runtime.broadcast(folder)
    # Everything that is imported or allocated once must be there before counting begins.
    tiny = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    tiny = runtime.prepare(tiny, gradient_checkpointing=False)
    with runtime.running(tiny):
        pass
    del tiny
    before = private_bytes()
    sampler = Sampler()
    sampler.start()
    began = time.perf_counter()
    model = runtime.load_base(folder, load=lambda: LlamaForCausalLM.from_pretrained(folder), dtype=torch.float32)
    model = runtime.prepare(model, gradient_checkpointing=False)
    seconds = time.perf_counter() - began
    sampler.done.set()
    sampler.join()
    peak = sampler.highest - before
    total = sum(p.numel() for p in model.parameters()) * 4
    block = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    bound = total / runtime.world_size + block
    for rank in range(runtime.world_size):
        if rank == runtime.rank:
            print(
                f"rank {rank}: peak {peak / MIB:.0f} MiB in {seconds:.1f} s; base {total / MIB:.0f} MiB / "
                f"{runtime.world_size} + block {block / MIB:.0f} MiB = {bound / MIB:.0f} MiB",
                flush=True,
            )
        runtime.barrier()
    if runtime.any(peak > bound):
        raise SystemExit("above the bound")
    if runtime.is_main:
        for file in Path(folder).iterdir():
            file.unlink()
        Path(folder).rmdir()


if __name__ == "__main__":
    main()
