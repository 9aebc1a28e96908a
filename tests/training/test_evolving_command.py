"""``agilerl sft`` with an ``evolution:`` section."""

from __future__ import annotations

import yaml

from agilerl.training.llm import read_lineage
from tests.cli.conftest import agilerl, model_folder, rows, sft  # noqa: F401 - fixtures


def test_it_evolves_prints_the_table_and_leaves_a_ready_description(sft, agilerl, tmp_path):  # noqa: F811
    code, out, err = sft(
        "evolution.population_size=3", "evolution.generations=2", "evolution.ranges.lr.min=1e-4",
        "evolution.ranges.lr.max=1e-1", "sft.lr=1e-3", "sft.batch_size=4", "training.epochs=2", "evaluation.samples=0",
    )  # fmt: skip
    folder = tmp_path / "out"
    assert code == 0, err
    lineage = read_lineage(folder)
    assert max(row["generation"] for row in lineage) == 2
    assert "Lineage" in out
    assert "the elite" in out
    winner = next(row for row in lineage if row.get("final") and row["is_elite"])
    ready = yaml.safe_load((folder / "winner.yaml").read_text())
    assert ready["sft"]["lr"] == winner["hyperparameters"]["lr"]
    assert f"sft.lr: {ready['sft']['lr']:.6g}" in out
    code, out, err = agilerl("sft", folder / "winner.yaml", "--output", tmp_path / "next", "evaluation.enabled=no")
    assert code == 0, err
    assert (tmp_path / "next" / "actor").is_dir()
    assert not (tmp_path / "next" / "population").exists()
