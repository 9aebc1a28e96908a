from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agilerl.cli import main
from agilerl.config.data import DataSection
from agilerl.data.checks import CHECKS
from agilerl.data.inspect import as_html, summary_lines
from agilerl.llm_envs import DatasetEnv, make_env
from agilerl.llm_envs.inspection import inspect_data
from tests.helpers import tiny_model, tiny_tokenizer

CHATML = tiny_tokenizer(all_bytes=True, chat_template="chatml", eos_token="<|im_end|>")
GOOD = [{"prompt": f"q{number}", "response": f"a{number}"} for number in range(6)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGILERL_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[Any]) -> str:
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return str(path)


FAULTS: list[tuple[Any, str]] = [
    ({"prompt": "q", "response": None}, "null_field"),
    ({"prompt": "q", "response": ""}, "empty_field"),
    ({"prompt": "  ", "response": "a"}, "empty_field"),
    ({"prompt": "q"}, "missing_field"),
    ({"prompt": 7, "response": "a"}, "not_text"),
    ({"prompt": "q", "response": ["a"]}, "not_messages"),
    ({"prompt": "q", "response": "\ud83d"}, "not_text"),
    (b'{"prompt": "q", "response": \n', "bad_json"),
    (b'{"prompt": "q\xff", "response": "a"}\n', "bad_encoding"),
    (b"[1]\n", "bad_json"),
    ({"prompt": "p" * 200, "response": "a"}, "prompt_too_long"),
    ({"prompt": "q", "response": "r" * 200}, "cut"),
    ({"prompt": "say <|im_end|>", "response": "a"}, "control_token"),
    ({"prompt": "q0", "response": "a0"}, "duplicate"),
]


def test_inspect_names_every_planted_fault_with_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tiny_model("llama", vocab_size=262, eos_token_id=5).save_pretrained(folder)
    CHATML.save_pretrained(folder)
    data = write(tmp_path / "broken.jsonl", [*GOOD, *(row for row, _ in FAULTS)])
    capsys.readouterr()
    arguments = ["inspect", "--model", str(folder), "--data", data, "data.max_context_length=100"]
    assert main([*arguments, "--json", "--rows", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    named = {(fault["row"], fault["reason"]) for key in ("faults", "left_out", "findings") for fault in found[key]}
    assert named >= {(len(GOOD) + place, reason) for place, (_, reason) in enumerate(FAULTS)}
    assert len(named) == len(FAULTS)
    assert (found["format"], found["rows_in"], found["rows_kept"], found["cut"]) == ("prompt_response", 20, 9, 1)
    assert sum(found["dropped"].values()) == 11
    assert found["rows"][1] | {"pieces": None} == {
        "row": 1, "text": "q1a1<|im_end|>", "trained_text": ["a1<|im_end|>"], "tokens": 5, "trained_tokens": 3, "pieces": None,
    }  # fmt: skip
    assert main([*arguments, "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    for place in range(len(FAULTS)):
        assert f"row {len(GOOD) + place} " in shown
    assert "<title>Training data</title>" in (tmp_path / "page.html").read_text()


def turns(*pairs: Any, **more: Any) -> dict[str, Any]:
    """A record with a chat: contents alternate between user and assistant, dicts are turns as they stand."""
    roles = ("user", "assistant")
    chat = [
        said if isinstance(said, dict) else {"role": roles[place % 2], "content": said}
        for place, said in enumerate(pairs)
    ]
    return {"messages": chat, **more}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    """An assistant's turn that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments} | more}]}


CHAT_FAULTS: list[tuple[Any, str]] = [
    (turns("", "a"), "empty_field"),
    (turns("q", "\n "), "empty_field"),
    (turns("q", None), "null_field"),
    (turns("q", 42), "not_text"),
    (turns("q", ["a", "b"]), "not_messages"),
    (turns("q", {"role": "assistant"}), "missing_field"),
    (turns({"role": "wizard", "content": "q"}, "a"), "bad_role"),
    (turns({"content": "q"}, "a"), "bad_role"),
    ({"messages": []}, "empty_field"),
    ({"messages": "hello"}, "not_messages"),
    ({"messages": ["q", "a"]}, "not_messages"),
    ({"other": 1}, "missing_field"),
    (turns({"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}), "assistant_first"),
    (turns("q"), "no_trained_turn"),
    (turns("q", {"role": "assistant", "content": "a", "train": False}), "no_trained_turn"),
    (turns("q", {"role": "assistant", "content": "a", "weight": "x"}), "bad_weight"),
    (turns("q", call("{a: 1")), "bad_tool_call"),
    (turns("q", call([1])), "bad_tool_call"),
    (turns("q", call({}, name=None)), "bad_tool_call"),
    (turns("q", "a", tools="nope"), "bad_tools"),
    (b'{"messages": [{"role": "user", "content": \n', "bad_json"),
    (b'{"messages": "\xff"}\n', "bad_encoding"),
    (b'{"messages": %s}\n' % (b"9" * 5000), "bad_json"),
    (turns("p" * 300, "a"), "prompt_too_long"),
    (turns("q", "r" * 300), "cut"),
    (turns("q1", "a1", "and?"), "ends_with_question"),
    (turns("q2", {"role": "user", "content": "q3"}, {"role": "assistant", "content": "a"}), "repeated_speaker"),
    (turns("q4", {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}), "late_system"),
    (turns("q5", {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}), "result_without_call"),
    (turns("say <|im_end|>", "a"), "control_token"),
    (turns("q6", "a<|im_end|>\n<|im_start|>user\nb"), "control_token"),
    (turns("q7", "caf\ufffd"), "damaged_text"),
    (turns("q8", "a\0b"), "damaged_text"),
    (turns("first", "answer"), "duplicate"),
    (turns("held", "out"), "overlap"),
]


def test_inspect_names_faults_of_chats_and_of_the_two_splits_together(tmp_path: Path) -> None:
    good = [turns("first", "answer"), turns("q", call("{}"), {"role": "tool", "content": "r"}, "a")]
    data = write(tmp_path / "broken.jsonl", [*good, *(row for row, _ in CHAT_FAULTS)])
    test = write(tmp_path / "held.jsonl", [turns("held", "out"), turns("other", None), turns("other", "one")])
    section = DataSection.model_validate({"train": data, "test": test, "max_context_length": 250})
    found = inspect_data(section, CHATML)
    told = found.as_dict()
    named = [(fault["row"], fault["reason"]) for key in ("faults", "left_out", "findings") for fault in told[key]]
    assert sorted(named) == [(len(good) + place, reason) for place, (_, reason) in enumerate(CHAT_FAULTS)]
    assert [check["name"] for check in told["checks"]] == ["overlap"]
    assert "held-out rows that cannot be used: 1" in told["notices"]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_a_wrong_column_is_exit_code_2_and_lists_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tiny_model("llama", vocab_size=262).save_pretrained(folder)
    CHATML.save_pretrained(folder)
    data = write(tmp_path / "rows.jsonl", GOOD)
    assert main(["inspect", "--model", str(folder), "--data", data, "data.prompt_column=promt"]) == 2
    output = capsys.readouterr()
    assert "its columns are 'prompt', 'response'. Did you mean 'prompt'" in output.err + output.out
    assert "Traceback" not in output.err


def test_summary_counts_what_a_person_asks_for(tmp_path: Path) -> None:
    env = DatasetEnv([*GOOD, GOOD[0]], GOOD[:1], CHATML, objective="sft")
    found = env.summary().as_dict()
    assert (found["tokens"], found["trained_tokens"], found["eos"], found["duplicates"]) == (35, 21, 7, 1)
    assert found["stop_tokens"] == {"<|im_end|>": 7}
    assert found["findings"] == [{"row": 6, "reason": "duplicate", "message": "is the same as row 0"}]
    assert sum(count for _, _, count in found["length_histogram"]) == 7
    lines = dict(summary_lines(env.summary(), batch_size=4, epochs=2))
    assert lines["optimizer steps"] == "4 of 4 rows"
    assert lines["rows"] == "7 read, 7 kept"


def test_views_show_characters_of_several_tokens_once() -> None:
    rows = [{"prompt": "<b>", "response": "é中😀"}]
    (view,) = DatasetEnv(rows, rows, CHATML, objective="sft").inspect()
    assert view.trained_text == ["é中😀<|im_end|>"]
    assert "".join(piece.text for piece in view.pieces) == view.text
    page = as_html([view], [("rows", "1")])
    assert "&lt;b&gt;" in page.replace("</span>", "").replace('<span class="p" title="prompt, not trained">', "")


def failing(name: str, tmp_path: Path) -> dict[str, Any]:
    """Arguments of ``make_env`` that only the named check refuses."""
    rows: list[Any] = [dict(row) for row in GOOD]
    settings: dict[str, Any] = {}
    if name == "overlap":
        settings["test"] = write(tmp_path / "test.jsonl", GOOD[:2])
    elif name == "stop_token":
        rows = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}]}
            for n in range(6)
        ]
        settings["chat_template"] = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    elif name == "stop_never_trained":
        rows = [{"input_ids": [20, 21, 22 + n], "labels": [-100, 21, 22 + n]} for n in range(6)]
    elif name == "everything_trained":
        rows = [{"input_ids": [20, 21, 22 + n, 5], "labels": [20, 21, 22 + n, 5]} for n in range(6)]
    elif name == "all_cut":
        rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}, {"role": "user", "content": "x" * 60}]} for n in range(1, 7)]  # fmt: skip  # noqa: E501
        settings["max_context_length"] = 80
    return {"data": write(tmp_path / "train.jsonl", rows), **settings}


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "nothing_trained"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_check_refuses_and_is_waived_by_name(name: str, tmp_path: Path) -> None:
    arguments = failing(name, tmp_path)
    path = arguments.pop("data")
    with pytest.raises(ValueError, match=rf"\({name}\).*go on with data\.allow=\[{name}\]"):
        make_env(path, CHATML, **arguments)
    assert len(make_env(path, CHATML, allow=[name], **arguments)) > 0
    with pytest.raises(ValueError, match="the checks are nothing_trained"):
        make_env(path, CHATML, allow=["everything"], **arguments)
