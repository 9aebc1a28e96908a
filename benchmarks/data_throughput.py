"""How fast and how lean is the way from a file of rows to tokenised splits?

Makes synthetic rows (``--rows``, default 200,000), then measures the tokenizer alone on the same texts, the whole preparation
from the file, and the second run, which starts from the cache; with the process's own memory after a quarter of the rows and
after all (pages of the cache's files, which the system takes back when it needs them, are told apart). Wall seconds mean
something on an idle machine only; the processor's seconds are told beside them.

    python benchmarks/data_throughput.py [--rows N] [--kind pair|chat] [--model PRESET_OR_FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

import psutil

WORDS = [
    "river", "stone", "light", "market", "seven", "garden", "window", "letter", "north", "quiet", "copper", "train",
    "morning", "engine", "paper", "yellow", "winter", "silver", "forest", "question",
]  # fmt: skip


def write_rows(path: Path, rows: int, kind: str) -> None:
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            prompt = f"{number}: " + " ".join(generator.choices(WORDS, k=generator.randint(15, 60))) + "?"
            answer = " ".join(generator.choices(WORDS, k=generator.randint(10, 60))) + "."
            if kind == "pair":
                row: dict = {"prompt": prompt, "response": answer}
            else:
                row = {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
            file.write(json.dumps(row) + "\n")


def tokenizer_alone(path: Path, tokenizer, kind: str) -> tuple[float, float]:
    """Wall and processor seconds of the fast backend for the texts that the preparation encodes, in the same chunks."""
    backend = tokenizer.backend_tokenizer
    seconds = busy = 0.0
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if kind == "chat":
        texts = []
        for start in range(0, len(rows), 1024):
            chats = [row["messages"] for row in rows[start : start + 1024]]
            texts += tokenizer.apply_chat_template(chats, tokenize=False)
        sides = [texts]
        encode = backend.encode_batch
    else:
        sides = [[row["prompt"] for row in rows], [row["response"] for row in rows]]
        encode = backend.encode_batch_fast
    for texts in sides:
        for start in range(0, len(texts), 1024):
            chunk = texts[start : start + 1024]
            begin, started = time.perf_counter(), time.process_time()
            encode(chunk, add_special_tokens=False)
            seconds += time.perf_counter() - begin
            busy += time.process_time() - started
    return seconds, busy


def resident() -> tuple[float, float]:
    """MiB of the process's own memory, and of file pages that it has mapped."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 2**20, memory.shared / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kind", choices=("pair", "chat"), default="pair")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()

    from agilerl.llm_envs import make_env
    from agilerl.models import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGILERL_CACHE"] = str(Path(folder) / "cache")
        path = Path(folder) / "rows.jsonl"
        small = Path(folder) / "small.jsonl"
        write_rows(small, options.rows // 4, options.kind)
        write_rows(path, options.rows, options.kind)

        # The tokenizer's own cache of words fills here, so that both measurements find it warm.
        make_env(str(small), tokenizer, is_cached=True)
        quarter = resident()
        begin, started = time.perf_counter(), time.process_time()
        env = make_env(str(path), tokenizer)
        whole, whole_busy = time.perf_counter() - begin, time.process_time() - started
        full = resident()
        begin = time.perf_counter()
        again = make_env(str(path), tokenizer)
        cached = time.perf_counter() - begin
        assert again.fingerprint == env.fingerprint
        alone, alone_busy = tokenizer_alone(path, tokenizer, options.kind)
        begin = time.perf_counter()
        for _ in range(200):
            env.reset()
        batches = (time.perf_counter() - begin) / 200
        tokens = env.summary().tokens

    rest = max(whole - alone, 1e-9)
    print(f"{options.rows:,} {options.kind} rows, {tokens:,} train tokens, {tokenizer.__class__.__name__}")
    print(f"whole preparation     {whole:8.2f} s   {options.rows / whole:10,.0f} rows/s")
    print(f"tokenizer alone       {alone:8.2f} s   {options.rows / alone:10,.0f} rows/s")
    print(f"everything else       {rest:8.2f} s   {options.rows / rest:10,.0f} rows/s")
    busy = max(whole_busy - alone_busy, 1e-9)
    print(f"  of the processor    {busy:8.2f} s   {options.rows / busy:10,.0f} rows/s")
    print(f"second run (cache)    {cached:8.2f} s")
    print(f"one batch of 8 rows   {batches * 1000:8.2f} ms")
    print(
        f"own memory            {quarter[0]:8.0f} MiB after {options.rows // 4:,} rows, {full[0]:,.0f} MiB after all; "
        f"pages of files {quarter[1]:,.0f} and {full[1]:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
