"""What a model can do on held-out rows: loss, perplexity, and exact match of its own greedy answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agilerl.config.schema import EvaluationSection
from agilerl.data.collate import inputs_of, samples_of
from agilerl.recipes.generation import generate_greedy, stop_ids

__all__ = ["Answer", "Evaluation", "Question", "answers_of", "evaluate", "questions_from", "questions_of"]


_ROLES = frozenset({"", "system", "user", "assistant", "model", "human", "tool"})


@dataclass(frozen=True)
class Question:
    """A held-out row as the model meets it: everything before its last trained span, and that span."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    inputs: Mapping[str, Any] | None = None
    """Further model inputs of the prompt: its images."""


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
    return Evaluation(loss, *answers_of(agent, env.tokenizer, questions, section, progress))


def answers_of(
    agent: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    section: EvaluationSection,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float | None, int, list[Answer]]:
    """Exact match over all ranks' questions (None without any), how many were answered, and this rank's answers."""
    answers = answer(agent.actor, tokenizer, questions, section, progress)
    exact, count = agent.runtime.sum([float(sum(one.is_exact for one in answers)), float(len(answers))])
    return exact / count if count else None, int(count), answers


def questions_of(env: Any, limit: int | None = None) -> list[Question]:
    """This rank's share of the first ``limit`` held-out rows, in their order."""
    samples = (
        (*sample, inputs)
        for batch in env.test_batches()
        for sample, inputs in zip(samples_of(batch), inputs_of(batch), strict=True)
    )
    return questions_from(samples, limit, env.world_size, image_id=getattr(env, "image_id", None))


def questions_from(
    samples: Iterable[tuple[Any, ...]], limit: int | None, world_size: int, *, image_id: int | None = None
) -> list[Question]:
    """This rank's share of the first ``limit`` questions among unpadded rows of (ids, weights[, further inputs]).

    Rows that show an image (``image_id``) behind their question are left out.
    """
    share = None if limit is None else math.ceil(limit / world_size)
    found = (_question(ids.tolist(), weights.tolist(), *more, image_id=image_id) for ids, weights, *more in samples)
    return list(islice((question for question in found if question is not None), share))


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
        inputs=[question.inputs for question in questions],
    )

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return [
        Answer(words_asked(tokenizer, question.prompt), text(question.expected), text(ids))
        for question, ids in zip(questions, given, strict=True)
    ]


def words_asked(tokenizer: Any, prompt: Sequence[int]) -> str:
    """The last words that a person put in, without the chat template around them."""
    added = tokenizer.added_tokens_decoder
    control = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
    parts: list[list[int]] = [[]]
    for token in prompt:
        if token in control:
            parts.append([])
        else:
            parts[-1].append(token)
    texts = [str(tokenizer.decode(part)).strip() for part in parts if part]
    spoken = [_without_role(text) for text in texts if text.lower() not in _ROLES]
    spoken = [text for text in spoken if text]
    return spoken[-1] if spoken else str(tokenizer.decode(list(prompt), skip_special_tokens=True))


def _without_role(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest.strip() if first.strip().lower() in _ROLES else text


def _question(
    ids: list[int], weights: list[float], inputs: Mapping[str, Any] | None = None, *, image_id: int | None = None
) -> Question | None:
    """Split a row before its last trained span; ``None`` if nothing stands before it."""
    trained = [place for place, weight in enumerate(weights) if weight]
    if not trained:
        return None
    end = trained[-1] + 1
    begin = end - 1
    while begin > 0 and weights[begin - 1]:
        begin -= 1
    if not begin or (inputs and image_id in ids[begin:]):
        return None
    own = {n: v[:begin] if v.ndim == 1 and len(v) == len(ids) else v for n, v in (inputs or {}).items()}
    return Question(tuple(ids[:begin]), tuple(ids[begin:end]), own or None)
