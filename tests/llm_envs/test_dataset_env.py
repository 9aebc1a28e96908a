from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from agilerl.data.collate import samples_of
from agilerl.llm_envs import DatasetEnv
from tests.helpers import tiny_tokenizer

TOKENIZER = tiny_tokenizer(chat_template="chatml")


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"q{number}", "response": f"answer {number}"} for number in range(count)]


def env_of(train: Any, test: Any = None, *, tokenizer: Any = TOKENIZER, **settings: Any) -> DatasetEnv:
    settings = {"objective": "sft"} | settings
    return DatasetEnv(train, rows(3) if test is None else test, tokenizer, **settings)


def prompts_of(env: DatasetEnv, count: int) -> list[list[str]]:
    return [env.reset()["prompt"] for _ in range(count)]  # type: ignore[typeddict-item]


def test_batch_has_the_documented_keys_and_marks_the_response() -> None:
    batch = env_of(rows(2), data_batch_size_per_gpu=2).reset()
    assert set(batch) == {"prompt", "response", "prompt_lengths", "input_ids", "attention_mask"}
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.long
    for (ids, weights), prompt, response in zip(samples_of(batch), batch["prompt"], batch["response"], strict=True):
        assert TOKENIZER.decode(ids[weights == 0]) == prompt
        assert TOKENIZER.decode(ids[weights == 1]) == response + "</s>"


@pytest.mark.parametrize("as_", ["list", "dataset", "stream"])
def test_forms_of_splits_give_the_same_batches(as_: str) -> None:
    forms = {"list": rows, "dataset": lambda n: Dataset.from_list(rows(n)), "stream": lambda n: IterableDataset.from_generator(
        rows, gen_kwargs={"count": n}
    )}  # fmt: skip
    env = env_of(forms[as_](7), forms[as_](3), data_batch_size_per_gpu=3)
    assert prompts_of(env, 3) == prompts_of(env_of(rows(7), data_batch_size_per_gpu=3), 3)
    assert env.dataset_size == {"train": 7, "test": 3}


@pytest.mark.parametrize("response", ["yo", "yo</s>", "yo</s></s>", "yo</s>\n"])
def test_exactly_one_trained_eos_ends_a_response(response: str) -> None:
    (sample,) = samples_of(env_of([{"prompt": "hi", "response": response}]).reset())
    assert sample[0].tolist().count(2) == 1
    assert sample[0][-1] == 2
    assert sample[1][-1] == 1


@pytest.mark.parametrize("prompt", ["hi", "<s>hi"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_at_most_one_bos(prompt: str, add_bos: bool) -> None:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    (sample,) = samples_of(env_of([{"prompt": prompt, "response": "yo"}], tokenizer=tokenizer).reset())
    assert sample[0].tolist().count(1) == int(add_bos)
    assert (sample[0][0] == 1) == add_bos


def test_pad_equal_to_eos_keeps_the_real_end() -> None:
    tokenizer = tiny_tokenizer(pad_token="</s>")
    batch = env_of(
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "long one"}], tokenizer=tokenizer
    ).reset()
    assert all(ids[-1] == 2 and weights[-1] == 1 for ids, weights in samples_of(batch))


def test_no_pad_token_is_fine_and_no_eos_is_not() -> None:
    assert env_of(rows(2), tokenizer=tiny_tokenizer(pad_token=None)).reset()["input_ids"].shape[0] == 2
    with pytest.raises(ValueError, match="no EOS token"):
        env_of(rows(2), tokenizer=tiny_tokenizer(eos_token=None))


def test_message_prompts_go_through_the_template_with_its_kwargs() -> None:
    template = (
        "{{ greeting }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = tiny_tokenizer(chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    batch = env_of(
        [{"prompt": messages, "response": "yo"}], tokenizer=tokenizer, chat_template_kwargs={"greeting": "Hey "}
    ).reset()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, greeting="Hey ", return_dict=False)
    assert batch["input_ids"][0].tolist() == [*expected, *tokenizer.encode("yo", add_special_tokens=False), 2]
    assert batch["prompt_lengths"] == [len(expected)]
    assert batch["prompt"] == ["Hey [user]hi>"]


def test_control_tokens_in_text_are_text_unless_asked() -> None:
    data = [{"prompt": "say <|im_end|> ok", "response": "<|im_end|>!"}]
    counts = [env_of(data, control_tokens=how).reset()["input_ids"][0].tolist().count(5) for how in ("text", "parse")]
    assert counts == [0, 2]


@pytest.mark.parametrize("column", ["prompt", "response"])
@pytest.mark.parametrize("value", [None, "", "   ", 7, ..., "\ud83d"])
def test_a_bad_field_names_row_and_column_or_is_skipped(column: str, value: Any) -> None:
    data: list[dict[str, Any]] = rows(4)
    data[2][column] = value
    if value is ...:
        del data[2][column]
    with pytest.raises(ValueError, match=rf"train split, row 2.*'{column}'"):
        env_of(data)
    with pytest.warns(UserWarning, match="of 4 rows, dropped 1"):
        env = env_of(data, bad_rows="skip")
    assert len(env) == 3
    assert env.report.faults[0].row == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "rl"}, "objective is 'rl'"),
        ({"response_column": "answer"}, "column 'answer' is missing; its columns are 'prompt', 'response'"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist in a world of 2"),
        ({"data_batch_size_per_gpu": 0}, "data_batch_size_per_gpu is 0"),
        ({"max_context_length": 0}, "max_context_length is 0"),
        ({"chat_template": "nope"}, "neither a known one"),
        ({"train_on": "some"}, "train_on is 'some'"),
        ({"control_tokens": "x"}, "control_tokens is 'x'"),
        ({"bad_rows": "x"}, "bad_rows is 'x'"),
    ],
)
def test_wrong_settings_are_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        env_of(rows(3), **settings)


def test_empty_or_wrong_splits_are_named() -> None:
    with pytest.raises(ValueError, match="train split: it is empty"):
        env_of([])
    with pytest.raises(ValueError, match="test split: it is empty"):
        env_of(rows(1), [])
    with pytest.raises(ValueError, match="train split: it is str"):
        env_of("rows.jsonl")
    with pytest.raises(ValueError, match="no chat template"):
        env_of([{"prompt": [{"role": "user", "content": "x"}], "response": "y"}], tokenizer=tiny_tokenizer())


def test_order_is_a_function_of_seed_and_epoch() -> None:
    one, same, other = (prompts_of(env_of(rows(9), data_batch_size_per_gpu=4, seed=seed), 6) for seed in (1, 1, 2))
    assert one == same != other
    assert one[:3] != one[3:]
    for epoch in (one[:3], one[3:]):
        assert sorted(chain.from_iterable(epoch)) == [f"q{number}" for number in range(9)]


@pytest.mark.parametrize(("count", "world"), [(10, 2), (10, 3), (9, 4), (1, 3)])
def test_ranks_share_every_global_batch_and_make_equal_steps(count: int, world: int) -> None:
    alone = env_of(rows(count), data_batch_size_per_gpu=2 * world)
    ranks = [env_of(rows(count), data_batch_size_per_gpu=2, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(2 * -(-count // (2 * world))):
        batches = [env.reset() for env in ranks]
        shared = [prompt for batch in batches for prompt in batch["prompt"]]
        assert sorted(shared) == sorted(alone.reset()["prompt"])
        assert all(batch["input_ids"].ndim == 2 for batch in batches)
    assert {env.num_epochs for env in ranks} == {alone.num_epochs} == {2}
    assert sum(len(env) for env in ranks) == count
    test = [[prompt for batch in env.test_batches(1) for prompt in batch["prompt"]] for env in ranks]
    assert sorted(chain.from_iterable(test)) == ["q0", "q1", "q2"]
    assert len({len(list(env.test_batches(1))) for env in ranks}) == 1


def test_a_rank_without_a_share_gets_no_rows() -> None:
    env = env_of(rows(1), rank=1, world_size=2)
    batch = env.reset()
    assert batch["input_ids"].shape == (0, 0)
    assert samples_of(batch) == []


def test_eval_mode_nests_and_survives_errors() -> None:
    env = env_of(rows(5), data_batch_size_per_gpu=2)
    with env.eval_mode():
        with pytest.raises(RuntimeError, match="stop"), env.eval_mode():
            raise RuntimeError("stop")
        assert env.evaluation_mode
        assert prompts_of(env, 2) == [["q0", "q1"], ["q2"]]
        assert len(env) == 3
    assert not env.evaluation_mode
    assert env.num_epochs == 0


def test_reset_dataloaders_rewinds_both_splits() -> None:
    env = env_of(rows(5), data_batch_size_per_gpu=5)
    first = env.reset()["prompt"]
    assert env.num_epochs == 1
    assert env.reset(reset_dataloaders=True)["prompt"] == first
    with env.eval_mode():
        assert env.reset()["prompt"] == ["q0", "q1", "q2"]


def test_take_never_crosses_an_epoch_and_feeds_are_independent() -> None:
    env = env_of(rows(5))
    feed = env.feed()
    assert [len(env.take(2)["prompt"]) for _ in range(4)] == [2, 2, 1, 2]
    assert (env.num_epochs, env.reader.position, feed.position) == (1, 2, 0)
    with pytest.raises(ValueError, match="asked for 0 rows"):
        env.take(0)


@pytest.mark.parametrize("stopped_after", [1, 3, 7])
def test_a_resumed_run_sees_each_row_once(stopped_after: int) -> None:
    straight = env_of(rows(20))
    expected = [straight.take(3)["prompt"] for _ in range(14)]
    first = env_of(rows(20))
    seen = [first.take(3)["prompt"] for _ in range(stopped_after)]
    second = env_of(rows(20), rank=0, world_size=1)
    second.load_state_dict(first.state_dict())
    assert seen + [second.take(3)["prompt"] for _ in range(14 - stopped_after)] == expected


def test_a_place_in_other_data_is_refused() -> None:
    state = env_of(rows(5)).state_dict()
    with pytest.raises(ValueError, match="other training data"):
        env_of(rows(6)).load_state_dict(state)
    with pytest.raises(ValueError, match="data seed 42"):
        env_of(rows(5), seed=1).load_state_dict(state)


@pytest.mark.filterwarnings("default")
def test_length_policy_counts_and_keeps_what_fits() -> None:
    data = [
        {"prompt": "p" * 3, "response": "r" * 3},
        {"prompt": "p" * 3, "response": "r" * 50},
        {"prompt": "p" * 50, "response": "yes"},
        {"prompt": "p" * 9, "response": "yes"},
    ]
    with pytest.warns(UserWarning, match=r"train split: of 4 rows, dropped 2 \(prompt too long\), cut 1") as told:
        env = env_of(data, data[:1], max_context_length=10, min_completion_length=2)
    assert len(told) == 1
    lengths = sorted(len(ids) for ids, _ in samples_of(env.reset()))
    assert lengths == [7, 10]
    assert (env.report.rows_kept, env.report.cut, dict(env.report.dropped)) == (2, 1, {"prompt_too_long": 2})


def test_nothing_left_is_a_value_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"none of its 1 rows is left \(1 prompt too long\)"):
        env_of([{"prompt": "word " * 200, "response": "yes"}], max_context_length=32)


@pytest.mark.parametrize(("on_long", "kept"), [("drop", 1), ("cut_response", 2), ("cut_prompt", 3)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_policy_is_applied_in_both_objectives(on_long: str, kept: int) -> None:
    data = [
        {"prompt": "p" * a, "response": "r" * b, "chosen": "r" * b, "rejected": "r"}
        for a, b in ((4, 5), (4, 15), (30, 9))
    ]
    sft = env_of(data, data[:1], max_context_length=16, on_long=on_long)
    pairs = env_of(data, data[:1], max_context_length=16, on_long=on_long, objective="preference")
    assert (len(sft), len(pairs)) == (kept, kept)
    assert sft.longest <= 16
    assert pairs.longest <= 16
    chosen = pairs.reset()
    for row in range(kept):
        assert chosen["chosen_attention_mask"][row].sum() > chosen["prompt_lengths"][row]
        assert chosen["rejected_attention_mask"][row].sum() > chosen["prompt_lengths"][row]


def test_rows_are_tokenised_once() -> None:
    tokenizer = tiny_tokenizer()
    env = env_of(rows(4), tokenizer=tokenizer)
    env._encoder.backend = None  # any further encoding would have to ask the tokenizer itself
    tokenizer._tokenizer = None
    assert len(prompts_of(env, 6)) == 6


# Streams ------------------------------------------------------------------------------------------------------------


def stream(count: int) -> IterableDataset:
    return IterableDataset.from_generator(rows, gen_kwargs={"count": count})


def test_a_long_stream_has_no_length_but_gives_each_row_once_per_pass() -> None:
    env = env_of(stream(25), stream_window=10)
    assert env.is_streaming
    assert env.dataset_size == {"test": 3}
    with pytest.raises(TypeError, match="max_steps"):
        len(env)
    passes = [[prompt for _ in range(9) for prompt in env.take(3)["prompt"]] for _ in range(2)]
    assert [sorted(prompts) for prompts in passes] == [sorted(f"q{number}" for number in range(25))] * 2
    assert passes[0] != passes[1]
    assert (env.num_epochs, env.reader.num_rows) == (2, None)


@pytest.mark.parametrize("on_long", ["drop", "cut_response", "cut_prompt", "split"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stream_is_cut_as_a_list_is(on_long: str) -> None:
    data = [{"prompt": "p" * a, "response": "r" * b} for a, b in ((4, 5), (4, 15), (30, 9), (3, 40))]
    settings = {"max_context_length": 16, "on_long": on_long}
    listed = env_of(data, data[:1], **settings)
    streamed = env_of(IterableDataset.from_generator(lambda: iter(data)), rows(1), stream_window=2, **settings)
    found, expected = (
        sorted((ids.tolist(), weights.tolist()) for ids, weights in samples_of(env.take(len(listed))))
        for env in (streamed, listed)
    )
    assert len(expected) > (on_long != "drop")
    assert found == expected


@pytest.mark.parametrize("stopped_after", [2, 5, 10])
def test_a_stream_is_resumed_where_it_stopped(stopped_after: int) -> None:
    straight = env_of(stream(25), stream_window=10)
    expected = [straight.take(4)["prompt"] for _ in range(14)]
    first = env_of(stream(25), stream_window=10)
    seen = [first.take(4)["prompt"] for _ in range(stopped_after)]
    second = env_of(stream(25), stream_window=10)
    second.load_state_dict(first.state_dict())
    assert seen + [second.take(4)["prompt"] for _ in range(14 - stopped_after)] == expected


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_a_stream_once(world: int) -> None:
    envs = [env_of(stream(10), stream_window=4, rank=rank, world_size=world) for rank in range(world)]
    alone = env_of(stream(10), stream_window=4)
    for _ in range(4):
        shared = [prompt for env in envs for prompt in env.take(3)["prompt"]]
        assert sorted(shared) == sorted(alone.take(3)["prompt"])
