"""One agent in training: its place in the data, what it has used of its budget, when it was last measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agilerl.metrics import Throughput, peak_memory_gib
from agilerl.training.llm.budget import Budget
from agilerl.training.llm.feeding import Reader, num_rows

__all__ = ["Trainee"]


@dataclass(eq=False)
class Trainee:
    """An agent and what the loop knows about it."""

    agent: Any
    reader: Reader
    rows: int = 0
    """Global rows trained in this run; a clone goes on from its parent's count."""
    first_epoch: int = 0
    measured_rows: int | None = None
    """``rows`` at the last evaluation: these very weights were measured while the two are equal."""
    measured_all: bool = False
    """Whether that evaluation read the whole test split."""
    throughput: Throughput = field(default_factory=Throughput, repr=False)

    @classmethod
    def begin(cls, agent: Any, reader: Reader, env: Any) -> Trainee:
        """Return an agent at the beginning of a run; it takes the env's tokenizer (to save it) if it has none."""
        if getattr(agent, "tokenizer", None) is None:
            agent.tokenizer = getattr(env, "tokenizer_with_template", getattr(env, "tokenizer", None))
        return cls(agent, reader, first_epoch=reader.epoch)

    @property
    def epochs(self) -> int:
        """Passes over the data completed in this run."""
        return self.reader.epoch - self.first_epoch

    @property
    def is_measured(self) -> bool:
        """Whether the last fitness belongs to the present weights."""
        return self.measured_rows == self.rows

    @property
    def fitness(self) -> float:
        """The last fitness; minus infinity before the first evaluation."""
        history = self.agent.fitness
        return float(history[-1]) if len(history) else float("-inf")

    def train(self, budget: Budget, iteration: int, log: Callable[[Mapping[str, Any]], None]) -> None:
        """One ``learn`` of at most ``batch_size`` rows, with its record."""
        agent = self.agent
        batch: Any = self.reader.take(budget.room(self, agent.batch_size))
        agent.init_training_step()
        lr = agent.current_lr
        metrics = agent.learn(batch)
        rows = int(agent.runtime.sum([num_rows(batch)])[0])
        agent.finalize_training_step(rows)
        agent.add_scores([-metrics["loss"]])
        self.rows += rows
        self.throughput.update(int(metrics.get("tokens", 0)), int(metrics.get("real_tokens", 0)))
        log(
            {
                "kind": "train",
                "agent": agent.index,
                "iteration": iteration,
                "rows": self.rows,
                "epoch": self.epochs,
                "lr": lr,
                **{key: value for key, value in metrics.items() if not key.startswith("learn_phase_")},
                **self.throughput.rates(),
                "peak_memory_gib": peak_memory_gib(agent.device),
            }
        )

    def clone(self, index: int) -> Trainee:
        """Return an independent copy of agent and place: same weights, moments, history, same rows behind it."""
        return self.adopt(self.agent.clone(index=index))

    def adopt(self, agent: Any) -> Trainee:
        """Return a trainee for ``agent``, which is a copy of this one's, at the same place."""
        return Trainee(
            agent=agent,
            reader=self.reader.fork(),
            rows=self.rows,
            first_epoch=self.first_epoch,
            measured_rows=self.measured_rows,
            measured_all=self.measured_all,
        )

    def close(self) -> None:
        """Let go of the place in the data."""
        self.reader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the agent, as plain data."""
        return {
            "index": int(self.agent.index),
            "rows": self.rows,
            "first_epoch": self.first_epoch,
            "measured_rows": self.measured_rows,
            "measured_all": self.measured_all,
            "reader": self.reader.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned; the agent itself is restored elsewhere."""
        self.agent.index = int(state["index"])
        self.rows = int(state["rows"])
        self.first_epoch = int(state["first_epoch"])
        self.measured_rows = state["measured_rows"]
        self.measured_all = bool(state["measured_all"])
        self.reader.load_state_dict(state["reader"])
