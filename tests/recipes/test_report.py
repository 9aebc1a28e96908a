"""What a run tells a person about its data."""

from __future__ import annotations

import io

from rich.console import Console

from agilerl.llm_envs import DatasetEnv
from agilerl.recipes.report import Reporter
from tests.helpers import tiny_tokenizer


def test_pairs_without_a_preference_are_counted() -> None:
    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "yes" if i == 1 else "no"} for i in range(3)]
    env = DatasetEnv(rows, rows, tiny_tokenizer(all_bytes=True), objective="preference")
    said = io.StringIO()
    Reporter(Console(file=said, width=300)).data(env)
    first = said.getvalue().splitlines()[0]
    assert first.startswith("train")
    assert "3 of 3 rows" in first
    assert "1 with identical answers" in first
