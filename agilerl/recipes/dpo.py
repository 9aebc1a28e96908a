"""The recipe of direct preference optimisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from agilerl.algorithms.dpo import DPO
from agilerl.config.schema import EvaluationSection
from agilerl.data.collate import preference_samples_of
from agilerl.recipes.evaluation import Answer, answers_of, questions_from
from agilerl.recipes.report import Reporter
from agilerl.recipes.run import Recipe

__all__ = ["DPO_RECIPE", "PairEvaluation", "evaluate_pairs"]


@dataclass(frozen=True)
class PairEvaluation:
    """Numbers over all held-out pairs, and the model's own answers beside the chosen ones."""

    loss: float
    """Preference loss, without the NLL term."""
    margin: float
    """Chosen minus rejected reward; 0 while the policy is the reference."""
    accuracy: float
    """Share of pairs whose chosen answer gained more than the rejected one."""
    preferred: float
    """Share of pairs whose chosen answer is the likelier one, the reference aside."""
    exact_match: float | None = None
    num_answered: int = 0
    answers: list[Answer] = field(default_factory=list)

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers as plain data."""
        names = ("loss", "margin", "accuracy", "preferred", "exact_match")
        return {name: getattr(self, name) for name in names} | {"answered": self.num_answered}


def evaluate_pairs(
    agent: DPO, env: Any, section: EvaluationSection, *, progress: Callable[[int, int], None] | None = None
) -> PairEvaluation:
    """Measure an agent on the whole test split; every rank takes its share. Its fitness history does not move."""
    numbers = agent.evaluate(env)
    result = (numbers["preference_loss"], numbers["reward_margin"], numbers["accuracy"], numbers["preferred"])
    if not section.exact_match:
        return PairEvaluation(*result)
    chosen: Iterable[Any] = (sample for batch in env.test_batches() for sample in preference_samples_of(batch)[0])
    questions = questions_from(chosen, section.limit, env.world_size)
    return PairEvaluation(*result, *answers_of(agent, env.tokenizer, questions, section, progress))


def _measured(report: Reporter, label: str, result: PairEvaluation) -> None:
    exact = "" if result.exact_match is None else f"  exact match {result.exact_match:.1%}"
    report.say(
        f"{label}  held-out margin {result.margin:+.3f}  accuracy {result.accuracy:.1%}  "
        f"chosen likelier {result.preferred:.1%}{exact}"
    )


def _compare(report: Reporter, before: PairEvaluation, after: PairEvaluation, samples: int) -> None:
    table = Table(title="Held-out pairs", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("preference loss", f"{before.loss:.4f}", f"{after.loss:.4f}")
    table.add_row("reward margin", f"{before.margin:+.3f}", f"{after.margin:+.3f}")
    table.add_row("accuracy", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}")
    table.add_row("chosen likelier", f"{before.preferred:.1%}", f"{after.preferred:.1%}")
    if before.exact_match is not None and after.exact_match is not None:
        table.add_row("answers as chosen", f"{before.exact_match:.1%}", f"{after.exact_match:.1%}")
    report.say()
    report.console.print(table)
    report.answers(before.answers, after.answers, samples)


DPO_RECIPE = Recipe(
    name="dpo",
    objective="preference",
    algorithm=DPO,
    measure=evaluate_pairs,
    measured=_measured,
    compare=_compare,
)
