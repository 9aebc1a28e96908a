from __future__ import annotations

import threading

import pytest
import torch

from agilerl.errors import DataError
from agilerl.recipes.generation import generate_greedy, stop_ids, stream
from tests.helpers import tiny_model, tiny_tokenizer


def alone(model, prompt, stop, count):
    """Greedy continuation by plain forward passes, no cache, no padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token in stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_batched_answers_equal_each_prompt_alone(family):
    model = tiny_model(family).eval()
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16], [20, 21]]
    expected = [alone(model, prompt, [2], 6) for prompt in prompts]
    answers = generate_greedy(model, prompts, stop=[2], max_new_tokens=6, batch_size=3)
    assert answers == expected
    assert any(answers)


def test_answers_end_before_a_stop_token_and_the_mode_is_restored():
    model = tiny_model("llama").train()
    (free,) = generate_greedy(model, [[5, 6, 7]], stop=[], max_new_tokens=5)
    assert len(free) == 5
    stop = free[2]
    (stopped,) = generate_greedy(model, [[5, 6, 7]], stop=[stop], max_new_tokens=5)
    assert stopped == free[: free.index(stop)]
    assert model.training


def test_streaming_equals_batched_generation():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    prompt = tokenizer("abc").input_ids
    (answer,) = generate_greedy(model, [prompt], stop=[2], max_new_tokens=8)
    pieces = list(stream(model, tokenizer, prompt, stop=[2], max_new_tokens=8))
    assert "".join(pieces) == tokenizer.decode(answer, skip_special_tokens=True)
    ordinary = answer[3]
    shorter = "".join(stream(model, tokenizer, prompt, stop=[ordinary], max_new_tokens=8))
    assert shorter == tokenizer.decode(answer[: answer.index(ordinary)], skip_special_tokens=True)


def test_an_error_in_the_model_reaches_the_reader_of_the_stream():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    with pytest.raises(IndexError):
        list(stream(model, tokenizer, [5, 10_000], stop=[2], max_new_tokens=2))


def test_leaving_a_stream_early_ends_the_work():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    pieces = stream(model, tokenizer, [5, 6], stop=[], max_new_tokens=100)
    next(pieces)
    pieces.close()
    assert not [thread for thread in threading.enumerate() if "work" in thread.name]


def test_answers_stay_within_the_positions_of_the_model():
    model = tiny_model("gpt2")  # 128 learned positions
    (answer,) = generate_greedy(model, [[5] * 120], stop=[], max_new_tokens=50)
    assert len(answer) == 8
    with pytest.raises(DataError, match="leaves no room"):
        generate_greedy(model, [[5] * 128], stop=[], max_new_tokens=50)


def test_drawn_answers_depend_on_the_seed_alone():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()

    def draw(seed):
        return "".join(stream(model, tokenizer, [5, 6], stop=[2], max_new_tokens=12, temperature=2.0, seed=seed))

    state = torch.random.get_rng_state()
    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1
    assert torch.equal(torch.random.get_rng_state(), state)


def test_stop_ids_gather_what_model_and_tokenizer_say():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    assert stop_ids(model, tokenizer, extra=[9, 11]) == sorted({7, 9, 11, tokenizer.eos_token_id})


def test_empty_prompts_are_refused():
    with pytest.raises(DataError, match="without tokens"):
        generate_greedy(tiny_model("llama"), [[1], []], stop=[2], max_new_tokens=1)
