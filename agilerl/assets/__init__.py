"""Files that come with the package: the demonstration data and its run."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CLARIFY", "COMMANDS"]

_HERE = Path(__file__).parent

COMMANDS = {split: str(_HERE / "commands" / f"{split}.jsonl") for split in ("train", "test")}
"""Split -> file: requests in plain English and their one-line JSON commands."""

CLARIFY = {split: str(_HERE / "clarify" / f"{split}.jsonl") for split in ("train", "test")}
"""Split -> file: preference pairs that go on from there (ask for what is missing, do not guess)."""
