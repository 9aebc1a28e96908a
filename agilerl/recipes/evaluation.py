"""What a model can do on held-out rows: loss, perplexity, and exact match of its own greedy answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agilerl.config.schema import EvaluationSection
from agilerl.data.collate import samples_of
from agilerl.recipes.generation import generate_greedy, stop_ids

__all__ = ["Answer", "Evaluation", "Question", "evaluate", "questions_of"]


@dataclass(frozen=True)
class Question:
    """A held-out row as the model meets it: everything before its last trained span, and that span."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    title: str
    """The prompt as a person wrote it."""


@dataclass(frozen=True)
class Answer:
    """What was asked, what should have come, what came."""

    prompt: str
    expected: str
    given: str

    @property
    def is_exact(self) -> bool:
        """Whether the texts are equal; white space around them does not count."""
        return self.given.strip() == self.expected.strip()


@dataclass(frozen=True)
class Evaluation:
    """Numbers over the whole held-out split, and the answers that were compared."""

    loss: float
    exact_match: float | None = None
    num_answered: int = 0
    answers: list[Answer] = field(default_factory=list)
    """Answers of this process."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers as plain data."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "exact_match": self.exact_match,
            "answered": self.num_answered,
        }


def evaluate(
    agent: Any, env: Any, section: EvaluationSection, *, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """Measure an agent on the whole test split of ``env``; every rank takes its share.

    Neither the agent's fitness history nor the place in the data moves.

    Args:
        agent: An SFT agent.
        env: Its ``DatasetEnv``.
        section: How many rows are answered, and how.
        progress: Called with (answers done, answers to come) on this rank.
    """
    history = list(agent.fitness)
    loss = -float(agent.test(env, loop=None))
    agent.fitness = history
    if not section.exact_match:
        return Evaluation(loss)
    questions = questions_of(env, section.limit)
    answers = answer(agent.actor, env.tokenizer, questions, section, progress)
    exact, count = agent.runtime.sum([float(sum(one.is_exact for one in answers)), float(len(answers))])
    return Evaluation(loss, exact / count if count else None, int(count), answers)


def questions_of(env: Any, limit: int | None = None) -> list[Question]:
    """This rank's share of the first ``limit`` held-out rows, in their order."""
    share = None if limit is None else math.ceil(limit / env.world_size)
    questions: list[Question] = []
    for batch in env.test_batches():
        samples = samples_of(batch)
        titles = batch.get("prompt") or [""] * len(samples)
        for (ids, weights), title in zip(samples, titles, strict=True):
            question = _question(ids.tolist(), weights.tolist(), str(title))
            questions += [question] if question is not None else []
        if share is not None and len(questions) >= share:
            return questions[:share]
    return questions


def answer(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    section: EvaluationSection,
    progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """Let ``model`` answer; texts are compared without control tokens."""
    # The token that ends the expected answers ends the model's own as well: a template may close a turn with a token
    # that is not the tokenizer's EOS.
    last = {question.expected[-1] for question in questions} & set(tokenizer.all_special_ids)
    stop = stop_ids(model, tokenizer, extra=last)
    longest = max((len(question.expected) for question in questions), default=0)
    given = generate_greedy(
        model,
        [question.prompt for question in questions],
        stop=stop,
        # An answer that runs past the longest expected one is wrong already.
        max_new_tokens=min(section.max_new_tokens, longest + 8),
        batch_size=section.batch_size,
        progress=None if progress is None else lambda done: progress(done, len(questions)),
    )

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return [
        Answer(question.title or text(question.prompt), text(question.expected), text(ids))
        for question, ids in zip(questions, given, strict=True)
    ]


def _question(ids: list[int], weights: list[float], title: str) -> Question | None:
    """Split a row before its last trained span; ``None`` if nothing stands before it."""
    trained = [place for place, weight in enumerate(weights) if weight]
    if not trained:
        return None
    end = trained[-1] + 1
    begin = end - 1
    while begin > 0 and weights[begin - 1]:
        begin -= 1
    return Question(tuple(ids[:begin]), tuple(ids[begin:end]), title) if begin else None
