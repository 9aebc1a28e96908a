"""When and how much the agents are measured. All agents read the same rows, and the same ones every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agilerl.training.llm.trainee import Trainee

__all__ = ["Evaluation", "EvaluationStopped", "default_eval_batches"]


def default_eval_batches(env: Any, interval: int | None, batch_size: int, dp_size: int) -> int:
    """Return the env batches of a periodic evaluation: a quarter of the rows trained between two."""
    rows = getattr(env, "data_batch_size_per_gpu", 1) * dp_size
    return max(1, math.ceil((interval or 1) * batch_size / 4 / rows))


class EvaluationStopped(Exception):
    """Somebody asked to stop while the whole test split was being read; the agent being measured got no fitness."""


class Evaluation:
    """Measures agents on the held-out rows.

    Args:
        env: Serves the rows.
        interval: Iterations between periodic evaluations; None: none.
        batches: Env batches of a periodic one.
        log: Takes the records.
        should_stop: Asked between the batches of an evaluation on everything, which may be long. Periodic ones are short
            and are never cut: what follows from them must not depend on when a signal came.
    """

    def __init__(
        self,
        env: Any,
        interval: int | None,
        batches: int,
        log: Callable[[Mapping[str, Any]], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._env = env
        self._interval = interval
        self.batches = batches
        self._log = log
        self._stoppable = _Stoppable(env, should_stop)

    def is_due(self, iteration: int) -> bool:
        """Return whether a periodic evaluation follows this iteration."""
        return self._interval is not None and iteration % self._interval == 0

    def measure(self, trainees: Sequence[Trainee], iteration: int, *, everything: bool = False) -> None:
        """Measure those whose present weights were not measured yet (on as much), so that nothing is paid twice.

        Raises:
            EvaluationStopped: It was asked to stop while measuring on everything.
        """
        for trainee in trainees:
            if trainee.is_measured and (trainee.measured_all or not everything):
                continue
            env, loop = (self._stoppable, None) if everything else (self._env, self.batches)
            fitness = float(trainee.agent.test(env, loop=loop))
            trainee.measured_rows, trainee.measured_all = trainee.rows, everything
            trainee.throughput.pause()
            self._log(
                {
                    "kind": "eval",
                    "agent": trainee.agent.index,
                    "iteration": iteration,
                    "rows": trainee.rows,
                    "epoch": trainee.epochs,
                    **_held_out(trainee.agent, fitness),
                    "fitness": fitness,
                }
            )


class _Stoppable:
    """An env that ends reading the test split early when asked to."""

    def __init__(self, env: Any, should_stop: Callable[[], bool]) -> None:
        self._env = env
        self._should_stop = should_stop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._env, name)
        return self._test_batches if name == "test_batches" else value

    def _test_batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in self._env.test_batches(*args, **kwargs):
            if self._should_stop():
                raise EvaluationStopped
            yield batch


def _held_out(agent: Any, fitness: float) -> dict[str, float]:
    """Loss and perplexity, where the fitness is a negative token-mean loss (SFT)."""
    if getattr(agent, "objective", "sft") != "sft":
        return {}
    loss = -fitness
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)) if not math.isnan(loss) else math.nan}
