from __future__ import annotations

import json

import pytest

from agilerl.cli import main
from tests.helpers import CHATML, tiny_model, tiny_tokenizer

WORDS = ("abc", "bcd", "cab", "dab", "bad", "cad", "dad", "add")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer(chat_template=CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    """Training and held-out rows as files."""

    def write(name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    train = write("train.jsonl", [{"prompt": word, "response": word[::-1]} for word in WORDS * 2])
    test = write("test.jsonl", [{"prompt": word + "!", "response": word[::-1]} for word in WORDS[:4]])
    return train, test


@pytest.fixture
def agilerl(capsys):
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def sft(agilerl, model_folder, rows, tmp_path):
    """``agilerl sft`` on the tiny model and rows; further words are added."""

    def run(*words, output=None, data=None, model=None):
        train, test = rows
        return agilerl(
            "sft",
            "--model",
            model_folder if model is None else model,
            "--data",
            data or train,
            "--test-data",
            test,
            "--output",
            output or tmp_path / "out",
            "log.console=plain",
            "evaluation.max_new_tokens=4",
            *words,
        )

    return run
