"""Put the parts of a run together, and take them apart at the end whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from agilerl.training.llm.budget import Budget
from agilerl.training.llm.checkpointing import Keeper
from agilerl.training.llm.evaluation import Evaluation, default_eval_batches
from agilerl.training.llm.evolution import Evolution
from agilerl.training.llm.feeding import open_readers, rows_per_epoch
from agilerl.training.llm.lineage import LINEAGE_FILE
from agilerl.training.llm.logs import open_log
from agilerl.training.llm.options import Options
from agilerl.training.llm.run import Run
from agilerl.training.llm.signals import stop_signals
from agilerl.training.llm.trainee import Trainee

__all__ = ["open_env", "open_run"]


@contextmanager
def open_env(env: Any, env_fn: Callable[[], Any] | None) -> Iterator[Any]:
    """Yield the given env, or one that is made here and closed at the end."""
    if env_fn is None:
        yield env
    else:
        with closing(env_fn()) as made:
            yield made


@contextmanager
def open_run(
    pop: Sequence[Any], env: Any, options: Options, *, selection: Any, mutation: Any, logging: Mapping[str, Any]
) -> Iterator[Run]:
    """Yield a run at its beginning."""
    first = pop[0]
    runtime = first.runtime
    budget = Budget.of(
        max_steps=options.max_steps, num_epochs=options.num_epochs, rows_per_epoch=rows_per_epoch(env, runtime)
    )
    readers = open_readers(env, len(pop), runtime.dp_size)
    batches = options.eval_batches or default_eval_batches(
        env, options.evaluation_interval, first.batch_size, runtime.dp_size
    )
    with ExitStack() as stack:
        log = stack.enter_context(open_log(is_main=runtime.is_main, total_rows=budget.rows, **logging))
        evolution = None
        if options.evo_steps is not None:
            lineage = None if options.folder is None else options.folder / LINEAGE_FILE
            evolution = Evolution(selection, mutation, options.evo_steps, log, lineage)
        keeper = stack.enter_context(closing(Keeper(options, is_main=runtime.is_main)))
        stop = stack.enter_context(stop_signals())
        # Several ranks would have to agree between batches, which costs more than it is worth: they read to the end.
        evaluation = Evaluation(
            env,
            options.evaluation_interval,
            batches,
            log,
            should_stop=lambda: stop.requested is not None and runtime.world_size == 1,
        )
        yield Run(
            options=options,
            runtime=runtime,
            budget=budget,
            trainees=[Trainee.begin(agent, reader, env) for agent, reader in zip(pop, readers, strict=True)],
            evaluation=evaluation,
            evolution=evolution,
            log=log,
            keeper=keeper,
            stop=stop,
        )
