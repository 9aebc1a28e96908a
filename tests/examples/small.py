"""The examples' surroundings, small: a tiny model in place of the preset, the first rows of the bundled sets."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

import agilerl.assets
from tests.helpers import tiny_model, tiny_tokenizer

ROWS = {"train": 64, "test": 12}


def surround(folder: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> Path:
    """Work in ``folder``; return the tiny model's folder."""
    tokenizer = tiny_tokenizer(chat_template="chatml", eos_token="<|im_end|>", all_bytes=True)
    model = tiny_model(family, spread=None, vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    for name in ("COMMANDS", "CLARIFY"):
        files = {}
        for split, path in getattr(agilerl.assets, name).items():
            files[split] = str(folder / f"{name}-{split}.jsonl")
            with Path(path).open(encoding="utf-8") as rows:
                Path(files[split]).write_text("".join(islice(rows, ROWS[split])), encoding="utf-8")
        monkeypatch.setattr(agilerl.assets, name, files)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AGILERL_CACHE", str(folder / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr("agilerl.models.presets.load_preset_folder", lambda name: folder / "tiny")
    return folder / "tiny"
