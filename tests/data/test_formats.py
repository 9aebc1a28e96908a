from __future__ import annotations

import json
import re
from typing import Any

import pytest

from agilerl.data.conversation import normal_messages
from agilerl.data.records import RowFault
from agilerl.llm_envs import DatasetEnv
from tests.data.helpers import chat, styled_tokenizer

TOKENIZER = styled_tokenizer("chatml")
USER, ASSISTANT = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>"
TURNS = chat(("user", "hi"), ("assistant", "yo"))


def texts(rows: list[dict[str, Any]], **settings: Any) -> tuple[str, list[tuple[str, list[str]]]]:
    """The detected format, and text and trained runs of each row."""
    env = DatasetEnv(rows, rows, TOKENIZER, **({"objective": "sft", "data_format": "auto"} | settings))
    views = env.inspect(len(rows) * 4, "test")
    return env.report.format, [(view.text, view.trained_text) for view in views]


CHAT = [(USER.format("hi") + ASSISTANT.format("yo") + "\n", ["yo<|im_end|>"])]


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"prompt": "q", "response": "a"}, "prompt_response", [("qa<|im_end|>", ["a<|im_end|>"])]),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", [("qa<|im_end|>", ["a<|im_end|>"])]),
        ({"question": "q", "answer": "a", "id": 3}, "prompt_response", [("qa<|im_end|>", ["a<|im_end|>"])]),
        ({"text": "all of it"}, "text", [("all of it<|im_end|>", ["all of it<|im_end|>"])]),
        ({"messages": TURNS}, "messages", CHAT),
        ({"messages": json.dumps(TURNS)}, "messages", CHAT),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "sharegpt", CHAT),
        ({"conversations": [{"from": "user", "value": "hi"}, {"from": "model", "value": "yo"}]}, "sharegpt", CHAT),
        ({"instruction": "hi", "input": "", "output": "yo"}, "alpaca", CHAT),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt_completion", CHAT),
        ({"prompt": "hi", "completion": TURNS[1]}, "prompt_completion", CHAT),
        ({"input_ids": [40, 41, 42], "labels": [-100, 41, 42]}, "tokens", None),
    ],
)
def test_formats_are_detected_and_read(row: dict[str, Any], name: str, expected: Any) -> None:
    found, rows = texts([row])
    assert found == name
    assert rows == expected if expected else len(rows) == 1


def test_alpaca_with_everything() -> None:
    row = {"instruction": "do", "input": "x", "output": "y", "system": "S", "history": [["a", "b"]]}
    _, [(text, trained)] = texts([row])
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n" + USER.format("a") + ASSISTANT.format("b") + "\n"
        + USER.format("do\n\nx") + ASSISTANT.format("y") + "\n"
    )  # fmt: skip
    assert trained == ["b<|im_end|>", "y<|im_end|>"]


def test_nested_instances_give_a_row_each_by_detection_and_by_columns() -> None:
    row = {"instruction": "do", "instances": [{"input": "", "output": "one"}, {"input": "x", "output": "two"}]}
    assert [trained for _, trained in texts([row])[1]] == [["one<|im_end|>"], ["two<|im_end|>"]]
    columns = {"prompt": "instruction", "response": "instances.output"}
    assert [text for text, _ in texts([row], columns=columns)[1]] == ["doone<|im_end|>", "dotwo<|im_end|>"]
    with pytest.raises(ValueError, match="row 0: it has an empty list 'instances'"):
        texts([{"instruction": "do", "instances": []}], columns=columns)


def test_a_wrong_column_lists_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"'questoin' is missing; its columns are 'question', 'answer'. Did you mean 'question'"
    ):
        texts([{"question": "q", "answer": "a"}], columns={"prompt": "questoin"})
    nested = [{"instruction": "do", "instances": [{"input": "x", "output": "y"}]}]
    for path, message in (
        (
            "instances.outptu",
            "'instances' holds no 'outptu'; it holds 'input', 'output'. Did you mean instances.output",
        ),
        ("instance.output", "'instance.output' is missing; its columns are 'instruction', 'instances'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            texts(nested, columns={"prompt": "instruction", "response": path})
        with pytest.raises(ValueError, match=re.escape(message)):
            texts(nested, columns={"prompt": "instruction", "response": path}, data_format=None)
    nested += [{"instruction": "do", "instances": [{"input": "x"}]}]
    with pytest.raises(ValueError, match=r"row 1: it has no 'instances\.output'"):
        texts(nested, columns={"prompt": "instruction", "response": "instances.output"})
    with pytest.raises(ValueError, match=r"its columns \('foo'\) fit no known format"):
        texts([{"foo": "bar"}])


def test_unused_columns_are_named() -> None:
    env = DatasetEnv([{"prompt": "q", "response": "a", "id": 1}], None, TOKENIZER, objective="sft", test_share=0.0)
    assert env.report.notices == ["columns not used: id"]
    rows = [{"instruction": "do", "instances": [{"input": "x", "output": "y", "meta": {"a": 1}}]}]
    columns = {"prompt": "instruction", "response": "instances.output"}
    env = DatasetEnv(rows, None, TOKENIZER, objective="sft", test_share=0.0, data_format="auto", columns=columns)
    assert env.report.notices == ["columns not used: instances.input, instances.meta"]


def test_plain_prompts_become_chats_when_asked_and_take_a_system_turn() -> None:
    from agilerl.data.formats import FormatOptions

    options = FormatOptions(render="chat", system="S")
    _, [(text, trained)] = texts([{"prompt": "hi", "response": "yo"}], options=options)
    assert text == "<|im_start|>system\nS<|im_end|>\n" + CHAT[0][0]
    assert trained == ["yo<|im_end|>"]


def test_an_unknown_speaker_lists_roles_and_the_option() -> None:
    row = {"conversations": [{"from": "narrator", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    with pytest.raises(ValueError, match=r"role 'narrator' in turn 0 .* known roles are system.*roles=\{'narrator'"):
        texts([row])
    assert normal_messages(row["conversations"], "c", {"narrator": "user"})[0] == {"role": "user", "content": "hi"}


@pytest.mark.parametrize("last", [[], chat(("user", "more"))])
def test_a_chat_that_ends_with_a_question_is_kept_and_counted(last: list[dict[str, Any]]) -> None:
    rows = [{"messages": TURNS + last}]
    env = DatasetEnv(rows, rows, TOKENIZER, objective="sft", data_format="auto")
    assert env.inspect()[0].trained_text == ["yo<|im_end|>"]
    assert env.report.notes["ends_with_question"] == len(last)


def test_a_chat_without_an_answer_is_left_out_with_a_reason() -> None:
    with pytest.raises(ValueError, match="no turn to train on; its roles are user"):
        texts([{"messages": TURNS[:1]}])


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"train_on": "all"}, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]),
        ({"train_on": "last"}, ["three<|im_end|>"]),
        ({"train_on": "marked"}, ["two<|im_end|>"]),
        ({"train_roles": ("user",)}, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]),
    ],
)
def test_which_turns_are_trained(settings: dict[str, Any], trained: list[str]) -> None:
    turns = chat(
        ("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "c"), ("assistant", "three")
    )
    turns[3]["train"] = True
    assert texts([{"messages": turns}], **settings)[1][0][1] == trained


def test_marks_and_weights_of_single_turns() -> None:
    turns = chat(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))
    turns[1]["train"], turns[3]["weight"] = False, 0.25
    rows = [{"messages": turns}]
    env = DatasetEnv(rows, rows, TOKENIZER, objective="sft", data_format="auto")
    weights = env.reset()["response_weights"]
    assert set(weights.unique().tolist()) == {0.0, 0.25}
    assert env.inspect()[0].trained_text == ["two<|im_end|>"]
    turns[3]["weight"] = "much"
    with pytest.raises(ValueError, match="weight 'much' in turn 3"):
        texts(rows)


def test_arguments_and_schemas_keep_no_nulls_of_columnar_storage() -> None:
    from datasets import Dataset

    def row(key: str, arguments: Any) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": f"f{key}", "parameters": {key: {"type": "string"}}}}
        call = {"type": "function", "function": {"name": f"f{key}", "arguments": arguments}}
        turns = [*chat(("user", "go")), {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": turns, "tools": [tool]}

    rows = [row("a", {"a": "1"}), row("b", {"b": "2"})]
    for form in (rows, Dataset.from_list(rows)):
        env = DatasetEnv(form, form, TOKENIZER, objective="sft", data_format="auto")
        for view in env.inspect(2, "test"):
            assert "null" not in view.text
            assert "None" not in view.text
    as_text = [row("a", json.dumps({"a": "1"})), row("b", json.dumps({"b": "2"}))]
    assert texts(as_text) == texts(rows)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad", "id": 1}, "q", "good", "bad"),
        ({"prompt": TURNS[:1], "chosen": "yo", "rejected": "no"}, None, "yo", "no"),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": chat(("assistant", "no"))}, None, "yo", "no"),
        ({"chosen": TURNS, "rejected": [TURNS[0], *chat(("assistant", "no"))]}, None, "yo", "no"),
        ({"chosen": "\n\nHuman: q\n\nAssistant: yo", "rejected": "\n\nHuman: q\n\nAssistant: no"}, None, " yo", " no"),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "yo"},
                "rejected": {"from": "gpt", "value": "no"},
            },
            None,
            "yo",
            "no",
        ),
        ({"instruction": "do", "input": "x", "chosen": "yo", "rejected": "no"}, "do\n\nx", "yo", "no"),
    ],
)
def test_preference_shapes(row: dict[str, Any], prompt: str | None, chosen: str, rejected: str) -> None:
    env = DatasetEnv([row], [row], TOKENIZER, objective="preference", data_format="auto")
    views = env.inspect(1)
    assert [view.side for view in views] == ["chosen", "rejected"]
    assert [view.trained_text for view in views] == [[f"{chosen}<|im_end|>"], [f"{rejected}<|im_end|>"]]
    batch: Any = env.reset()
    length = batch["prompt_lengths"][0]
    assert batch["chosen_input_ids"][0, :length].tolist() == batch["rejected_input_ids"][0, :length].tolist()
    start = TOKENIZER.decode(batch["chosen_input_ids"][0, :length])
    assert start == (prompt or start)
    assert views[0].text == start + f"{chosen}<|im_end|>"


def test_identical_answers_are_counted_and_bad_ones_named() -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": other} for other in ("b", "a", "c")]
    env = DatasetEnv(rows, rows, TOKENIZER, objective="preference")
    assert env.report.notes["identical_answers"] == 1
    with pytest.raises(ValueError, match="row 0: it has an empty 'rejected'"):
        DatasetEnv([{"prompt": "q", "chosen": "a", "rejected": ""}], rows, TOKENIZER, objective="preference")
    with pytest.raises(ValueError, match="column 'prompt' is missing"):
        DatasetEnv([{"chosen": "a", "rejected": "b"}], rows, TOKENIZER, objective="preference")


@pytest.mark.parametrize("data_format", ["auto", None])
def test_columns_that_pairs_do_not_use_are_named(data_format: str | None, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": 1, "messages": TURNS, "prompt": "q", "chosen": "a", "rejected": "b"}] * 2
    given = {} if data_format is None else {"data_format": data_format}
    env = DatasetEnv(rows, rows, TOKENIZER, objective="preference", **given)
    assert env.dataset_size == {"train": 2, "test": 2}
    batch = env.reset()
    assert TOKENIZER.decode(batch["chosen_input_ids"][0]).startswith("q")
    assert any("columns not used: id, messages" in notice for notice in env.report.notices)


def test_a_label_that_was_shifted_beforehand_is_refused() -> None:
    with pytest.raises(ValueError, match="label 41 at token 0"):
        texts([{"input_ids": [40, 41, 42], "labels": [41, 42, -100]}])


def test_faults_say_what_is_wrong_with_a_turn() -> None:
    for turns, message in (
        ("nonsense", "not JSON"),
        ([], "empty list"),
        (["hi"], "not a message"),
        ([{"content": "hi"}], "no role"),
        ([{"role": "user", "content": None}], r"null 'c\[0\].content'"),
        ([{"role": "user", "content": 3}], "not text"),
        ([{"role": "user", "said": "hi"}], r"no content in turn 0 of 'c'; its keys are role, said"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "without a name"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}], r"not an object: \[1\]"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 0}]}], "not an object: 0"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a: 1"}]}], "not JSON"),
    ):
        with pytest.raises(RowFault, match=message):
            normal_messages(turns, "c")
