"""Instruction rows for the benchmarks: small sums in words, generated, the same on every machine.

python -m benchmarks.rows 32 rows.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

__all__ = ["make_pairs", "make_rows"]

_NAMES = ["Ada", "Ben", "Chloe", "Dan", "Eve", "Farid", "Grace", "Hugo", "Ines", "Jonas"]
_THINGS = ["apples", "pencils", "marbles", "stamps", "shells", "coins", "books", "ribbons"]
_PLACES = ["the market", "school", "the harbour", "a fair", "the library", "a friend's house"]


def _row(rng: random.Random, num_steps: int) -> dict[str, str]:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    have = rng.randint(10, 90)
    story = [f"{name} starts the week with {have} {thing}."]
    answer = [f"{name} has {have} {thing} at first."]
    for _ in range(num_steps):
        other, place, count = rng.choice(_NAMES), rng.choice(_PLACES), rng.randint(2, 12)
        if have > count and rng.random() < 0.5:
            story.append(f"At {place}, {name} gives {count} of them to {other}.")
            answer.append(f"After giving {count} away, {have} - {count} = {have - count} {thing} are left.")
            have -= count
        else:
            story.append(f"At {place}, {other} hands {name} {count} more of them.")
            answer.append(f"With {count} more, {have} + {count} = {have + count} {thing} are there.")
            have += count
    prompt = " ".join(story) + f" How many {thing} does {name} have in the end?\n\n"
    return {"prompt": prompt, "response": " ".join(answer) + f"\n#### {have}"}


def make_rows(count: int, *, seed: int = 0, longest: int = 12) -> list[dict[str, str]]:
    """Rows of very different length: from about 60 to about 480 tokens, 190 on average, with the tokenizer of SmolLM2.

    Args:
        count: How many.
        seed: Of the generator.
        longest: Steps of the longest row; about 45 tokens each.
    """
    rng = random.Random(seed)
    sizes = [1 + round((longest - 1) * rng.random() ** 2.4) for _ in range(count)]
    if count:
        sizes[rng.randrange(count)] = longest
    return [_row(rng, size) for size in sizes]


def make_pairs(count: int, *, seed: int = 0, longest: int = 8) -> list[dict[str, str]]:
    """Preference pairs whose prompts are about as long as both answers together; the rejected answer is another story's."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        size = 1 + round((longest - 1) * rng.random() ** 2)
        # A story's prompt is shorter than its answer, so the story before it makes up for that.
        first = _row(rng, size + (size + 1) // 2)
        second, other = (_row(rng, size) for _ in range(2))
        prompt = f"{first['prompt'].strip()}\n{second['prompt']}"
        pairs.append({"prompt": prompt, "chosen": second["response"], "rejected": other["response"]})
    return pairs


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        "".join(json.dumps(row) + "\n" for row in make_rows(int(sys.argv[1]))), encoding="utf-8"
    )
