"""An evolving population on two ranks: the same history as on one, and never two opinions."""

from __future__ import annotations

import json

import pytest

from agilerl.training.llm import read_lineage
from tests.distributed.launch import finish, start
from tests.training import rank_main


def test_two_ranks_evolve_as_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    rank_main.main(tmp_path / "one")
    for code, output in finish(start(2, ["-m", "tests.training.rank_main", str(tmp_path / "two")]), timeout=200):
        assert code == 0, output
    first, second = (json.loads((tmp_path / "two" / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = json.loads((tmp_path / "one" / "rank0.json").read_text())
    for name in ("seeded", "resumed"):
        assert first[name]["settings"] == alone[name]["settings"]
        assert first[name]["fitness"] == pytest.approx(alone[name]["fitness"], abs=1e-4)
    histories = [
        [row | {"fitness": None} for row in read_lineage(tmp_path / name / "seeded")] for name in ("one", "two")
    ]
    assert histories[0] == histories[1]
    assert all(size % 2 == 0 for _, _, size, _ in first["free"]["settings"])
