from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agilerl.config.data import DataSection
from agilerl.data.held_out import split_by_content
from agilerl.data.order import mix
from agilerl.data.sources import Sources, open_source
from agilerl.llm_envs import make_env
from agilerl.llm_envs.inspection import inspect_data
from tests.helpers import tiny_tokenizer

TOKENIZER = tiny_tokenizer(all_bytes=True, chat_template="chatml")
ROWS = [{"prompt": f"q{number}", "response": f"a{number}"} for number in range(8)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGILERL_CACHE", str(tmp_path / "cache"))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(*names: Any, **settings: Any) -> list[Any]:
    parts = [(source, label, None) for name in names for source, label in open_source(str(name))]
    return [row for _, row in Sources(parts, **settings)]


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "json", "data.json", "csv", "tsv", "parquet", "arrow", "folder", "glob"]
)
def test_every_kind_of_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "data.json":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif kind in ("csv", "tsv"):
        mark = "\t" if kind == "tsv" else ","
        path.write_text("\n".join([f"prompt{mark}response", *(f"{r['prompt']}{mark}{r['response']}" for r in ROWS)]))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        folder = tmp_path / "many"
        folder.mkdir()
        write_jsonl(folder / "a.jsonl", ROWS[:3])
        write_jsonl(folder / "b.jsonl", ROWS[3:])
        path = folder if kind == "folder" else folder / "*.jsonl"
    assert read(path) == ROWS


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS


def test_cells_of_a_csv_stay_text_and_only_the_empty_one_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    words = ["NA", "null", "None", "nan", "1.50", "say <|im_end|> ok"]
    path.write_text("prompt,response\n" + "".join(f"q,{word}\n" for word in words) + "q,\n")
    assert [row["response"] for row in read(path)] == [*words, ""]
    found = inspect_data(DataSection.model_validate({"train": str(path)}), TOKENIZER, rows=9)
    assert [view.trained_text[0] for view in found.views] == [f"{word}</s>" for word in words]
    assert [(fault.row, fault.reason) for fault in found.summary.report.faults] == [(6, "empty_field")]
    assert found.views[5].trained_text == ["say <|im_end|> ok</s>"]
    assert found.summary.stop_tokens == {"</s>": 6}


def test_text_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'\xef\xbb\xbf{"prompt": "\xf0\x9f\x98\x80", "response": "\xe4\xb8\xad\xe6\x96\x87"}\r\n', b"\r\n"]
    lines += [
        b'{"prompt": "x", "response": "\\ud83d"}\r\n',
        b'{"prompt": "bad \xff", "response": "y"}\n',
        b'{"prompt": \n',
    ]
    path.write_bytes(b"".join(lines))
    table = tmp_path / "rows.csv"
    table.write_bytes(
        b"\xef\xbb\xbfprompt,response\r\n\xf0\x9f\x98\x80,\xe4\xb8\xad\xe6\x96\x87\r\nbad \xff,y\r\na,b,c\r\n"
    )
    script = (
        "import sys; from agilerl.data.files import read_file; from pathlib import Path\n"
        "for name in sys.argv[1:]:\n"
        "  for row in read_file(Path(name)): print(ascii(row) if isinstance(row, dict) else f'{row.reason}: {row}')\n"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = subprocess.run(
        [sys.executable, "-c", script, str(path), str(table)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    good = "{'prompt': '\\U0001f600', 'response': '\\u4e2d\\u6587'}"
    assert output[:2] == [good, "{'prompt': 'x', 'response': '\\ud83d'}"]
    assert output[2] == "bad_encoding: holds a byte that is not UTF-8 (byte 16 of rows.jsonl:4)"
    assert output[3].startswith("bad_json: is not JSON")
    assert "rows.jsonl:5" in output[3]
    assert output[4] == good
    assert output[5] == "bad_encoding: holds a byte that is not UTF-8 in 'prompt' (rows.csv:3)"
    assert output[6] == "bad_csv: has 3 cells where the header has 2 (rows.csv:4)"


def test_json_that_cannot_be_held_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"a": %s}' % (b"9" * 5000), b"[" * 100_000, b'{"a": 1} {"a": 2}', b'{"a": 3}']
    path.write_bytes(b"\n".join(lines))
    *faults, last = [str(row) for row in read(path)]
    assert [fault.partition(" of ")[2] for fault in faults] == [f"rows.jsonl:{line})" for line in (1, 2, 3)]
    assert all(found in fault for found, fault in zip(("many digits", "nested", "Extra data"), faults, strict=True))
    assert last == "{'a': 3}"
    for line, message in zip(lines, ("many digits", "nested too deeply"), strict=False):
        (tmp_path / "whole.json").write_bytes(line)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "whole.json")


def test_what_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "broken.json").write_text('[{"a": 1},\n {"a" 2}]')
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("row.jsonl", "does not exist. Did you mean rows.jsonl"),
        ("*.csv", "No data file matches"),
        ("empty", "holds no data file"),
        ("broken.json", "broken.json:2 is not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_sources_follow_each_other_or_are_mixed_by_weight(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": str(n)} for n in range(40)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "response": str(n)} for n in range(400)])
    assert len(read(a, b)) == 440
    assert read(a, b, limit=41)[-1]["prompt"] == "b"
    parts = [(open_source(str(path))[0][0], path.name, weight) for path, weight in ((a, 1.0), (b, 3.0))]
    mixed, again, other = (list(Sources(parts, seed=seed)) for seed in (1, 1, 2))
    assert mixed == again != other
    share = sum(row["prompt"] == "a" for _, row in mixed) / len(mixed)
    assert 0.15 < share < 0.35
    assert len({(row["prompt"], row["response"]) for _, row in mixed}) == len(mixed)
    with pytest.raises(ValueError, match="give all of them one, or none"):
        Sources([(parts[0][0], "a", 1.0), (parts[1][0], "b", None)])


def test_a_bad_row_of_several_files_names_its_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "b.jsonl", [ROWS[3], {"prompt": "x", "response": None}])
    with pytest.raises(ValueError, match=r"train split, row 1 of b.jsonl: it has a null 'response'"):
        make_env(str(tmp_path), TOKENIZER)


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_held_out_share_never_straddles_duplicates(count: int) -> None:
    contents = np.repeat(mix(np.arange(count, dtype=np.uint64)), 2)
    train, test = split_by_content(contents, np.arange(2 * count), 0.2)
    assert not set(contents[train]) & set(contents[test])
    assert sorted([*train, *test]) == list(range(2 * count))
    assert len(test) == 2 * (0 if count == 1 else max(1, round(0.2 * count)))
    again, _ = split_by_content(contents, np.arange(2 * count), 0.2)
    assert again.tolist() == train.tolist()


def test_an_environment_from_a_file_holds_rows_out_and_checks_them(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS + ROWS)
    env = make_env(str(path), TOKENIZER, test_share=0.25)
    assert env.dataset_size == {"train": 12, "test": 4}
    assert env.summary().num_duplicates == 6
    ranks = [make_env(str(path), TOKENIZER, test_share=0.25, rank=rank, world_size=2) for rank in (0, 1)]
    assert {one.fingerprint for one in ranks} == {env.fingerprint}


def cached_entries(tmp_path: Path) -> int:
    return len(list((tmp_path / "cache" / "data").glob("*/meta.json")))


def test_the_second_run_starts_from_the_cache_and_any_change_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(letter: str) -> list[Any]:
        turns = [[("user", "q"), ("assistant", letter * count)] for count in (3, 9)]
        return [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns]

    tokenizer = tiny_tokenizer(all_bytes=True, chat_template="chatml", eos_token="<|im_end|>")
    path = write_jsonl(tmp_path / "rows.jsonl", rows("a"))
    first = make_env(str(path), tokenizer).reset()["input_ids"].tolist()
    with monkeypatch.context() as patched:
        patched.setattr("agilerl.data.prepare._prepare", lambda *_, **__: pytest.fail("tokenised again"))
        assert make_env(str(path), tokenizer).reset()["input_ids"].tolist() == first
    assert cached_entries(tmp_path) == 1
    changed: list[dict[str, Any]] = [
        {"chat_template": "zephyr"},
        {"max_context_length": 400},
        {"train_on": "last"},
        {"chat_template_kwargs": {"a": 1}},
    ]
    for count, settings in enumerate(changed, start=2):
        found = make_env(str(path), tokenizer, **settings).reset()["input_ids"].tolist()
        assert found == make_env(str(path), tokenizer, **settings, is_cached=False).reset()["input_ids"].tolist()
        assert (found == first) == ("chat_template" not in settings)
        assert cached_entries(tmp_path) == count
    other = tiny_tokenizer(all_bytes=True, chat_template="chatml", eos_token="<|im_end|>", add_bos=True)
    assert [row[0] for row in make_env(str(path), other).reset()["input_ids"].tolist()] == [1]
    assert cached_entries(tmp_path) == 6
    other.chat_template = str(other.chat_template).replace("<|im_end|>\n", "<|im_end|>\n\n")
    make_env(str(path), other)
    assert cached_entries(tmp_path) == 7
    write_jsonl(path, rows("b"))
    assert make_env(str(path), tokenizer).reset()["input_ids"].tolist() != first
    assert cached_entries(tmp_path) == 8


def test_streaming_needs_a_test_split_and_reads_files_in_windows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"give data\.test"):
        make_env(str(path), TOKENIZER, streaming=True)
    held = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "t", "response": "t"}])
    env = make_env(str(path), TOKENIZER, streaming=True, test=str(held))
    assert env.dataset_size == {"train": 8, "test": 1}
