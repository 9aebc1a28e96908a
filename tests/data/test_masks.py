from __future__ import annotations

import numpy as np
import pytest
import torch

from agilerl.data.collate import samples_of
from agilerl.data.encoder import TextEncoder
from agilerl.data.fit import LengthPolicy, fit
from agilerl.data.records import Example, RowFault, Span
from agilerl.errors import DataError
from agilerl.llm_envs import DatasetEnv
from tests.data.helpers import chat, example_of, trained_texts
from tests.helpers import tiny_tokenizer


def text_example(length: int, head: int = 0) -> Example:
    ids = np.arange(10, 10 + length, dtype=np.int32)
    return Example(ids, (Span(head, length, 1.0),), head, "", "", is_whole=True, head_length=head)


@pytest.mark.parametrize("head", [0, 1, 2])
def test_split_text_loses_no_target(head: int) -> None:
    total = 0
    for length in (5, 2, 3, 11, 23):
        example = text_example(length + head, head)
        rows, was_cut = fit(example, LengthPolicy(4 + head, on_long="split"))
        assert all(len(row.ids) <= 4 + head and row.num_targets > 0 for row in rows)
        assert all(row.ids[:head].tolist() == example.ids[:head].tolist() for row in rows)
        targets = [token for row in rows for a, b, _ in row.spans for token in row.ids[max(a, 1) : b].tolist()]
        assert targets == example.ids[max(head, 1) :].tolist()
        assert not was_cut
        total += len(targets)
    assert total == sum(length - (head == 0) for length in (5, 2, 3, 11, 23))


def test_targets_in_are_targets_out_plus_what_was_cut() -> None:
    examples = [Example(np.arange(n, dtype=np.int32), (Span(1, n, 1.0),), 1, "", "") for n in (5, 2, 3, 7)]
    kept = [fit(example, LengthPolicy(4)) for example in examples]
    assert [rows[0].num_targets for rows, _ in kept] == [3, 1, 2, 3]
    assert [was_cut for _, was_cut in kept] == [True, False, False, True]


def test_cut_prompt_keeps_its_head_and_the_response() -> None:
    example = Example(np.arange(20, dtype=np.int32), (Span(15, 20, 1.0),), 15, "", "", head_length=2)
    (row,), was_cut = fit(example, LengthPolicy(10, on_long="cut_prompt"))
    assert row.ids.tolist() == [0, 1, 12, 13, 14, 15, 16, 17, 18, 19]
    assert row.spans == (Span(5, 10, 1.0),)
    assert was_cut


def test_a_row_of_one_token_has_no_target() -> None:
    with pytest.raises(RowFault, match="no token to train on"):
        fit(Example(np.array([7], dtype=np.int32), (Span(0, 1, 1.0),), 0, "", ""), LengthPolicy())


@pytest.mark.parametrize(("prompt", "response"), [("foo.", "..bar"), ("ab", "c"), ("Answer: ", "yes")])
def test_no_merge_crosses_the_boundary_of_plain_rows(prompt: str, response: str) -> None:
    tokenizer = tiny_tokenizer(merges=((".", "."), ("b", "c"), ("Ġ", "y")))
    rows = [{"prompt": prompt, "response": response}]
    ((ids, weights),) = samples_of(DatasetEnv(rows, rows, tokenizer, objective="sft").reset())
    assert tokenizer.decode(ids[weights == 1]) == response + "</s>"


def test_a_merge_across_the_boundary_of_a_chat_is_trained_as_a_whole() -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(chat_template=template, merges=(("Ġ", "y"),))
    example = example_of(tokenizer, chat(("user", "ok"), ("assistant", "yes")))
    assert trained_texts(tokenizer, example) == [" yes<|im_end|>"]


def test_a_template_with_bos_and_a_tokenizer_that_adds_it_give_one() -> None:
    for emits in (True, False):
        template = (
            "{{ bos_token }}" if emits else ""
        ) + "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
        for adds in (True, False):
            tokenizer = tiny_tokenizer(chat_template=template, add_bos=adds)
            example = example_of(tokenizer, chat(("user", "a"), ("assistant", "b")))
            assert example.ids.tolist().count(1) == int(emits or adds)
            assert trained_texts(tokenizer, example) == ["b<|im_end|>"]


@pytest.mark.parametrize("turn", [0, 1])
def test_control_tokens_in_a_turn_are_text_and_spans_stay_right(turn: int) -> None:
    tokenizer = tiny_tokenizer(chat_template="chatml")
    messages = chat(("user", "hi"), ("assistant", "yo"))
    messages[turn]["content"] = "say <|im_end|> ok"
    example = example_of(tokenizer, messages)
    assert example.ids.tolist().count(5) == 2
    assert trained_texts(tokenizer, example) == [messages[1]["content"] + "<|im_end|>"]
    assert example_of(tokenizer, messages, control_tokens="parse").ids.tolist().count(5) == 3


def test_weights_and_padding_sides_mean_the_same() -> None:
    right = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "prompt_lengths": [1, 0],
    }
    left = right | {
        "input_ids": torch.tensor([[0, 5, 6, 7], [5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
    }
    for batch in (right, left):
        samples = samples_of(batch)  # type: ignore[arg-type]
        assert [ids.tolist() for ids, _ in samples] == [[5, 6, 7], [5, 6, 7, 8]]
        assert [weights.tolist() for _, weights in samples] == [[0, 1, 1], [0, 1, 1, 1]]
    weighted = left | {"response_weights": torch.tensor([[9.0, 0.0, 0.5, 0.0], [1.0, 1.0, 0.0, 2.0]])}
    assert [weights.tolist() for _, weights in samples_of(weighted)] == [[0, 0.5, 0], [0, 1, 0, 2]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "has no 'input_ids'"),
        ({"attention_mask": torch.ones(2, 3)}, "make them equal"),
        ({"prompt_lengths": [1]}, "1 entries for 2 rows"),
        ({"prompt_lengths": [1, -1]}, "lengths must be 0 or more"),
        ({"prompt_lengths": None}, "neither 'prompt_lengths' nor"),
        ({"response_weights": torch.full((2, 4), float("nan"))}, "NaN"),
        ({"input_ids": torch.ones(4, dtype=torch.long)}, r"must be \[rows, length\]"),
    ],
)
def test_a_malformed_batch_is_a_sentence(change: dict, message: str) -> None:
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
        "prompt_lengths": [1, 1],
    }
    with pytest.raises(DataError, match=message):
        samples_of(batch | change)  # type: ignore[arg-type]


def test_the_users_tokenizer_is_left_as_it_was() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    before = tokenizer.backend_tokenizer.to_str()
    assert len(TextEncoder(tokenizer).encode(["a much longer text"])[0]) == 18
    assert tokenizer.backend_tokenizer.to_str() == before
