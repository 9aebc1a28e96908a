"""Imports point down the list of docs/architecture.md and never up; rooms on one line do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agilerl"

LAYERS = (
    {"errors", "typing", "optional", "cache", "hardware", "lanes", "recomputing"},
    {"config"},
    {"data", "models", "losses", "optim", "distributed", "metrics"},
    {"checkpoint"},
    {"algorithms", "llm_envs"},
    {"hpo"},
    {"training"},
    {"recipes"},
    {"cli", "utils"},
)
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> Iterator[tuple[str, int]]:
    """Every room of ours that ``file`` imports, inside functions and under TYPE_CHECKING too."""
    package = ".".join(("agilerl", *file.relative_to(PACKAGE).parts[:-1]))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "agilerl" else [base]
        else:
            continue
        yield from ((name.split(".")[1], node.lineno) for name in names if name.startswith("agilerl."))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    room = room_of(file)
    if room in ("__init__", "__main__", "assets"):
        return
    assert room in RANK, f"{room} is not in the list: add it here and to docs/architecture.md"
    for other, line in imported_rooms(file):
        if other in (room, "__version__"):
            continue
        # The first line (errors, typing ...) and the last (cli, utils) are made of files that may use each other.
        is_same_line = RANK[other] == RANK[room] and RANK[room] in (0, len(LAYERS) - 1)
        downwards = RANK[other] < RANK[room] or is_same_line
        assert downwards, f"{file.relative_to(ROOT)}:{line}: {room} imports {other}"


def test_the_check_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    file = tmp_path / "data" / "deep" / "rows.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import agilerl.cli\nfrom agilerl import hpo\nfrom agilerl.models.head import Head\n"
        "def f():\n    from ...training.llm import loop\n    from . import near\n"
    )
    assert [room for room, _ in imported_rooms(file)] == ["cli", "hpo", "models", "training", "data"]
