"""Encoding and counting preference pairs, alike for all subjects. Standard library only."""

from __future__ import annotations

import json
import resource
from typing import Any

__all__ = ["count_tokens", "encode_pair", "report"]


def encode_pair(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int], list[int]]:
    """Prompt, chosen and rejected answer apart; one end-of-sequence token at the end of each answer."""
    prompt = tokenizer(row["prompt"]).input_ids
    answers = [tokenizer(row[side], add_special_tokens=False).input_ids for side in ("chosen", "rejected")]
    return prompt, *([*ids, tokenizer.eos_token_id] for ids in answers)


def count_tokens(tokenizer: Any, rows: list[dict[str, str]]) -> int:
    """Tokens of both rows of every pair, the prompt twice: what a plain implementation computes."""
    encoded = [encode_pair(tokenizer, row) for row in rows]
    return sum(2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in encoded)


def report(tokenizer: Any, rows: list[dict[str, str]], seconds: float, cpu: float, losses: list[float]) -> None:
    """Print one line of JSON about the timed ``rows``: rates, peak memory of the process, losses."""
    tokens = count_tokens(tokenizer, rows)
    result = {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu,
        "seconds": seconds,
        "tokens": tokens,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "losses": losses,
    }
    print(json.dumps(result), flush=True)
