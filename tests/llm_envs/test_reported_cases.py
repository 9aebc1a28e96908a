"""Inputs that went wrong elsewhere, with the values that are right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import IterableDataset

from agilerl.data.collate import samples_of
from agilerl.llm_envs import DatasetEnv, make_env
from agilerl.recipes.chat import Conversation
from tests.data.helpers import chat
from tests.helpers import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:train split. of:UserWarning", "ignore:test split. of:UserWarning")

GOOD = [{"prompt": f"q{number}", "response": f"a{number}"} for number in range(3)]
LONG = [{"prompt": "word " * 200, "response": "yes"}]


def env_of(train: Any, test: Any = None, **settings: Any) -> DatasetEnv:
    tokenizer = settings.pop("tokenizer", None) or tiny_tokenizer()
    return DatasetEnv(train, GOOD if test is None else test, tokenizer, **({"objective": "sft"} | settings))


def test_a_prompt_beyond_the_limit_alone_among_others_and_held_out() -> None:
    with pytest.raises(ValueError, match=r"train split: none of its 1 rows is left \(1 prompt too long\)"):
        env_of(LONG, max_context_length=32)
    mixed = env_of([*GOOD, *LONG], max_context_length=32)
    assert (len(mixed), dict(mixed.report.dropped)) == (3, {"prompt_too_long": 1})
    assert all(weights.sum() > 0 for _, weights in samples_of(mixed.reset()))
    with pytest.raises(ValueError, match=r"test split: none of its 1 rows is left \(1 prompt too long\)"):
        env_of(GOOD, LONG, max_context_length=32)
    assert env_of(GOOD, [*GOOD, *LONG], max_context_length=32).dataset_size == {"train": 3, "test": 3}


@pytest.mark.parametrize(
    ("on_long", "lengths"), [("drop", [10]), ("cut_response", [10, 16, 16]), ("split", [10, 16, 16])]
)
@pytest.mark.parametrize("kind", ["list", "stream"])
def test_ten_twenty_and_forty_tokens_under_a_limit_of_sixteen(kind: str, on_long: str, lengths: list[int]) -> None:
    data = [{"prompt": "pppp", "response": "r" * (size - 5)} for size in (10, 20, 40)]
    stream = IterableDataset.from_generator(lambda: iter(data))
    env = env_of(data if kind == "list" else stream, max_context_length=16, on_long=on_long, stream_window=2)
    rows = samples_of(env.take(2)) + (samples_of(env.take(2)) if len(lengths) > 1 else [])
    assert sorted(len(ids) for ids, _ in rows)[: len(lengths)] == lengths
    if kind == "list":
        assert (env.report.rows_in, env.report.rows_kept) == (3, len(lengths))
        assert (env.report.cut, env.report.dropped["too_long"]) == (3 - 1 if len(lengths) > 1 else 0, 3 - len(lengths))


def test_rows_are_capped_at_the_models_positions_without_any_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGILERL_CACHE", str(tmp_path / "cache"))
    path, held = tmp_path / "rows.csv", tmp_path / "held.csv"
    path.write_text(f"prompt,response\nq,{'r' * 199}\nq,short\n")
    held.write_text("prompt,response\nx,y\n")
    env = make_env(str(path), tiny_tokenizer(), test=str(held), max_positions=64)
    assert sorted(len(ids) for ids, _ in samples_of(env.reset())) == [7, 64]
    assert env.report.cut == 1
    with pytest.raises(ValueError, match="max_context_length is 65, but the model has 64 positions"):
        make_env(str(path), tiny_tokenizer(), test=str(held), max_positions=64, max_context_length=65)


def test_three_rows_and_one_held_out_row_give_a_batch_each() -> None:
    env = env_of(GOOD, GOOD[:1], max_context_length=512, data_batch_size_per_gpu=16)
    assert len(samples_of(env.reset())) == 3
    assert [len(samples_of(batch)) for batch in env.test_batches()] == [1]


@pytest.mark.parametrize("emits", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_one_bos_in_train_held_out_rows_and_chats_whoever_adds_it(emits: bool, adds: bool) -> None:
    template = "{{ bos_token }}" if emits else ""
    template += "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=template, add_bos=adds)
    turns = chat(("user", "a"), ("assistant", "b"))
    rows = [{"messages": turns}, {"messages": chat(("user", "see"), ("assistant", "c"))}]
    replies = [{"prompt": turns[:1], "response": "b"}, {"prompt": turns[:1], "response": "c"}]
    for data in (rows, replies):
        env = env_of(data, data, tokenizer=tokenizer, data_format="auto")
        batches = [env.reset(), *env.test_batches()]
        opened: Any = SimpleNamespace(tokenizer=tokenizer)
        asked = Conversation(opened)._prompt("a")
        assert asked.count(1) == int(emits or adds)
        assert asked in [ids[: len(asked)].tolist() for ids, _ in samples_of(batches[0])]
        for ids, _ in (sample for batch in batches for sample in samples_of(batch)):
            assert ids.tolist().count(1) == int(emits or adds)


def test_no_pad_token_gives_batches_of_ids_that_the_model_has() -> None:
    tokenizer = tiny_tokenizer(pad_token=None)
    env = env_of([*GOOD, {"prompt": "a longer one", "response": "b"}], tokenizer=tokenizer, data_batch_size_per_gpu=4)
    batch: Any = env.reset()
    assert batch["input_ids"].max() < len(tokenizer)
    assert sorted(len(ids) for ids, _ in samples_of(batch)) == [5, 5, 5, 14]
    assert batch["attention_mask"].sum(1).sort().values.tolist() == [5, 5, 5, 14]


def test_chats_without_a_template_are_told_with_what_to_do() -> None:
    rows = [{"messages": chat(("user", "a"), ("assistant", "b"))}]
    with pytest.raises(ValueError, match=r"no chat template.*chat_template='chatml'.*tokenizer\.chat_template"):
        env_of(rows, rows, data_format="auto")
    env = env_of(rows, rows, data_format="auto", chat_template="chatml")
    assert env.inspect()[0].trained_text == ["b<|im_end|>"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_split_of_few_rows_is_disjoint_and_may_be_empty(count: int) -> None:
    data = [{"prompt": f"q{number}", "response": f"a{number}"} for number in range(count)]
    tokenizer = tiny_tokenizer()
    whole = DatasetEnv(data * 2, None, tokenizer, objective="sft", test_share=0.2, data_batch_size_per_gpu=99)
    ranks = [
        DatasetEnv(data * 2, None, tokenizer, objective="sft", test_share=0.2, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    held, *of_ranks = (
        sorted(prompt for env in envs for batch in env.test_batches() for prompt in batch["prompt"])
        for envs in ([whole], ranks)
    )
    assert of_ranks == [held]
    assert len(held) == len(set(held)) * 2 == (0 if count == 1 else 2)
    assert not set(held) & set(whole.reset()["prompt"])
    assert whole.dataset_size == {"train": 2 * count - len(held), "test": len(held)}
