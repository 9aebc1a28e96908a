"""The bundled sets: what the generator writes, exactly checkable, and without overlap between the splits."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "agilerl" / "assets"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("make_demo_data", str(ROOT / "scripts" / "make-demo-data"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / name).read_text(encoding="utf-8").splitlines()]


def question(row: dict) -> str:
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return message["content"]


def test_files_are_what_the_generator_writes(generator: ModuleType) -> None:
    for name, text in generator.files().items():
        assert (ASSETS / name).read_text(encoding="utf-8") == text, f"run scripts/make-demo-data: {name} differs"


def test_command_rows_are_many_unique_and_exact(generator: ModuleType) -> None:
    train, test = rows_of("commands/train.jsonl"), rows_of("commands/test.jsonl")
    assert len(train) >= 400
    assert len(test) >= 100
    prompts = [question(row) for row in train + test]
    assert len(set(prompts)) == len(prompts)
    for row in train + test:
        answer = json.loads(row["response"])
        assert json.dumps(answer) == row["response"]
        assert set(answer) == {"do", *generator.ACTIONS[answer["do"]][0]}


def test_no_pattern_and_no_value_is_in_both_splits(generator: ModuleType) -> None:
    for _, seen, unseen in generator.ACTIONS.values():
        assert not set(seen) & set(unseen)
        assert len(set(seen)) == len(seen)
    for seen, unseen in generator.SLOTS.values():
        assert not set(seen.split(", ")) & set(unseen.split(", "))
    for name, splits in generator.INCOMPLETE.items():
        for _, seen, unseen in splits:
            assert not set(seen) & set(unseen), name
    train_values = {(key, value) for row in rows_of("commands/train.jsonl") for key, value in answer_items(row)}
    test_values = {(key, value) for row in rows_of("commands/test.jsonl") for key, value in answer_items(row)}
    assert train_values
    assert not train_values & test_values


def answer_items(row: dict) -> list[tuple]:
    answer = json.loads(row["response"])
    return [((answer["do"], key), value) for key, value in answer.items() if key != "do"]


def test_preference_pairs_prefer_asking_only_where_something_is_missing(generator: ModuleType) -> None:
    for name, wanted in (("clarify/train.jsonl", 150), ("clarify/test.jsonl", 50)):
        rows = rows_of(name)
        assert len(rows) >= wanted
        asks = [json.loads(row["chosen"])["do"] == "ask" for row in rows]
        assert 0.5 < sum(asks) / len(rows) < 0.8
        for row, should_ask in zip(rows, asks, strict=True):
            acts = json.loads(row["rejected" if should_ask else "chosen"])
            missing = json.loads(row["chosen" if should_ask else "rejected"])["about"]
            said = str(acts[missing]).lower() in question(row).lower()
            assert said != should_ask, row
