"""One launch of ranks serves many tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import checks, scenarios
from tests.distributed.launch import finish, start


class Ranks:
    """What the ranks of one launch returned."""

    def __init__(self, folder: Path, ranks: int, names: tuple[str, ...], timeout: float) -> None:
        self.folder, self.count = folder, ranks
        outcome = finish(start(ranks, ["-m", "tests.distributed.checks", str(folder), *names]), timeout)
        self.output = "\n".join(
            f"-- rank {rank}: exit {code}\n{text[-3000:]}" for rank, (code, text) in enumerate(outcome)
        )

    def value(self, name: str, rank: int = 0) -> Any:
        """What a check returned; fails with the ranks' output if it did not get there."""
        file = self.folder / f"{name}.rank{rank}.pt"
        assert file.exists(), f"check {name!r} was not reached.\n{self.output}"
        result = torch.load(file, weights_only=False)
        assert "value" in result, result["error"]
        return result["value"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models, where ranks leave their results as well."""
    folder = tmp_path_factory.mktemp("ranks")
    scenarios.save_tiny(folder / "plain")
    scenarios.save_tiny(folder / "tied", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="session")
def two(models: Path) -> Ranks:
    """Two ranks."""
    return Ranks(models, 2, checks.TWO, timeout=560)


@pytest.fixture(scope="session")
def four(models: Path, two: Ranks) -> Ranks:
    """Four ranks, which resume what two saved."""
    folder = models / "four"
    folder.mkdir()
    for item in models.iterdir():
        if item.is_dir() and item != folder:
            (folder / item.name).symlink_to(item)
    return Ranks(folder, 4, checks.FOUR, timeout=560)


@pytest.fixture(scope="session")
def alone() -> dict[str, scenarios.Run]:
    """Every scenario in this one process, without a process group."""
    return {name: scenarios.run_scenario(name, "ddp") for name in scenarios.SCENARIOS}
