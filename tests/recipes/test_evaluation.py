from __future__ import annotations

import math

import pytest
import torch

from agilerl.algorithms.sft import SFT
from agilerl.config.schema import EvaluationSection
from agilerl.llm_envs import DatasetEnv
from agilerl.recipes.evaluation import Answer, Evaluation, answer, evaluate, questions_from, questions_of
from tests.helpers import tiny_model, tiny_tokenizer

ROWS = [{"prompt": word, "response": word[::-1]} for word in ("ab", "abc", "bcd", "a", "cdab")]


@pytest.fixture
def env():
    return DatasetEnv(ROWS, ROWS, tiny_tokenizer(), objective="sft", data_batch_size_per_gpu=2)


@pytest.fixture
def agent():
    tokenizer = tiny_tokenizer()
    return SFT(0, "<pad>", actor_network=tiny_model("llama"), tokenizer=tokenizer, gradient_checkpointing=False)


def test_questions_split_rows_before_the_last_trained_span(env):
    tokenizer = env.tokenizer
    questions = questions_of(env)
    assert len(questions) == 5
    assert [tokenizer.decode(list(one.prompt), skip_special_tokens=True) for one in questions] == [
        row["prompt"] for row in ROWS
    ]
    assert [tokenizer.decode(list(one.expected), skip_special_tokens=True) for one in questions] == [
        row["response"] for row in ROWS
    ]
    assert all(one.expected[-1] == tokenizer.eos_token_id for one in questions)
    assert questions_of(env, limit=3) == questions[:3]


def test_the_last_of_several_spans_is_asked_for():
    ids, weights = torch.arange(8), torch.tensor([0.0, 1, 1, 0, 0, 1, 0.5, 0])
    (question,) = questions_from([(ids, weights)], None, 1)
    assert question.prompt == (0, 1, 2, 3, 4)
    assert question.expected == (5, 6)
    assert questions_from([(ids, torch.zeros(8))], None, 1) == []


def test_measuring_leaves_the_agent_as_it_was(agent, env):
    agent.fitness = [-1.0]
    agent.actor.train()
    result = evaluate(agent, env, EvaluationSection(max_new_tokens=4))
    assert agent.fitness == [-1.0]
    assert agent.actor.training
    assert env.num_epochs == 0
    assert result.loss == -float(agent.test(env, loop=None))
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert (result.exact_match, result.num_answered) == (0.0, 5)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_loss_and_answers_do_not_depend_on_batch_sizes(agent, batch_size):
    env = DatasetEnv(ROWS, ROWS, tiny_tokenizer(), objective="sft", data_batch_size_per_gpu=batch_size)
    reference = DatasetEnv(ROWS, ROWS, tiny_tokenizer(), objective="sft", data_batch_size_per_gpu=5)
    section = EvaluationSection(max_new_tokens=6, batch_size=batch_size)
    wanted = evaluate(agent, reference, EvaluationSection(max_new_tokens=6, batch_size=5))
    result = evaluate(agent, env, section)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert result.answers == wanted.answers


def test_a_model_that_knows_the_answers_matches_exactly(env):
    tokenizer = env.tokenizer
    model = tiny_model("llama")
    questions = questions_of(env)

    def recite(input_ids, attention_mask, **_):
        """Continue each prompt with its expected answer."""
        known = {one.prompt: one.expected for one in questions}
        rows = [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, attention_mask, strict=True)]
        tails = [known[row] for row in rows]
        width = max(map(len, tails))
        tail = torch.tensor([[*one, *[tokenizer.eos_token_id] * (width - len(one))] for one in tails])
        return torch.cat([input_ids, tail], dim=1)

    model.generate = recite
    answers = answer(model, tokenizer, questions, EvaluationSection(batch_size=3))
    assert all(one.is_exact for one in answers)
    assert [one.given for one in answers] == [row["response"] for row in ROWS]


def test_white_space_around_an_answer_does_not_count():
    assert Answer("p", "a b", " a b\n").is_exact
    assert not Answer("p", "a b", "a  b").is_exact


def test_a_huge_loss_has_an_infinite_perplexity():
    assert Evaluation(1e4).perplexity == math.inf
