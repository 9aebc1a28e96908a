"""The training loop: ``train_llm_dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.metrics import Sink
from agilerl.training.llm.checkpointing import fittest
from agilerl.training.llm.evaluation import EvaluationStopped
from agilerl.training.llm.feeding import settle
from agilerl.training.llm.options import Options, check_population, warn_about_init_hp
from agilerl.training.llm.run import Run
from agilerl.training.llm.setup import open_env, open_run

__all__ = ["train_llm_dataset"]


def train_llm_dataset(
    pop: Sequence[Any],
    env: Any = None,
    env_fn: Callable[[], Any] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    save_elite: bool | None = None,
    elite_path: str | Path | None = None,
    wb: bool = False,
    tensorboard: bool = False,
    tensorboard_log_dir: str | Path | None = None,
    csv: bool = False,
    csv_log_dir: str | Path | None = None,
    evo_steps: int | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_path: str | Path | None = None,
    selection_strategy: Any = None,
    tournament: Any = None,
    mutation: Any = None,
    wandb_api_key: str | None = None,
    wandb_kwargs: Mapping[str, Any] | None = None,
    evaluation_interval: int | None = 10,
    verbose: bool = True,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    *,
    eval_batches: int | None = None,
    pre_training_mut: bool = False,
    resume: bool | str | Path | None = None,
    checkpoints: bool = True,
    keep_last: int = 2,
    keep_best: int = 1,
    lora_only: bool = True,
    save_optimizer: bool = True,
    async_save: bool = False,
    on_save_error: str = "raise",
    sinks: Sequence[Sink] = (),
) -> tuple[list[Any], list[float]]:
    """Train agents on a dataset env, each for the whole budget, and evolve them if asked to.

    A *step* is one dataset row, over all ranks, per agent; an *iteration* is one ``learn`` of every agent.

    Args:
        pop: Agents; several of them share a frozen base when made by ``clone()`` or ``population()``. Those that
            selection replaces are cleaned up and cannot be used afterwards.
        env: Serves the rows; all agents are judged on its test split. With one agent its own cursor moves.
        env_fn: Makes the env instead; called once, and the env is closed at the end.
        init_hp: Notes for the logs. ``BATCH_SIZE`` and ``UPDATE_EPOCHS`` that contradict the agents are warned about.
        save_elite: Write the best agent alone to ``elite_path`` whenever it is known; default: if ``elite_path`` is given.
        elite_path: Folder of that agent.
        wb: Log to Weights & Biases.
        tensorboard: Write TensorBoard events.
        tensorboard_log_dir: Their folder; default ``tensorboard_logs``.
        csv: Write ``metrics.csv``.
        csv_log_dir: Its folder; default ``csv_logs``.
        evo_steps: Iterations between two selections; default: as often as evaluations.
        checkpoint_steps: Rows between two checkpoints; the end is saved in any case.
        checkpoint_path: Folder of the checkpoints; default ``elite_path``, else ``./saved_checkpoints``.
        selection_strategy: Decides which agents go on, such as ``TournamentSelection``.
        tournament: The same under its older name; give one of the two.
        mutation: ``Mutations`` of hyper-parameters after each selection.
        wandb_api_key: Key for Weights & Biases; without one it records offline.
        wandb_kwargs: Further arguments of ``wandb.init``.
        evaluation_interval: Iterations between two evaluations; None: only before selections and at the end.
        verbose: Show progress.
        max_steps: Rows that each agent trains.
        num_epochs: Passes over the data instead; wins over ``max_steps``. Neither: one pass.
        eval_batches: Env batches of a periodic evaluation; default: a quarter of the rows trained between two. The
            final evaluation reads the whole test split.
        pre_training_mut: Vary the members before training, so that they do not begin as equals.
        resume: True: go on from the run's own folder if it holds a checkpoint; a path: go on from that one.
        checkpoints: False writes none, and no lineage file.
        keep_last: Newest checkpoints kept below the folder.
        keep_best: Best ones kept beside them.
        lora_only: As in ``save_checkpoint``.
        save_optimizer: As in ``save_checkpoint``; resuming needs it.
        async_save: Write in the background while training goes on.
        on_save_error: What a save that fails (a full disk) does: "raise" stops the run, "warn" goes on without it.
        sinks: Further places for the records.

    Returns:
        The population, and the fitness of each of its agents on the whole test split.

    Raises:
        ConfigError: Arguments that cannot be used, told together. Also a ``ValueError``.
        Interrupted: Ctrl-C or SIGTERM came; a checkpoint was saved before. Also a ``KeyboardInterrupt``.
    """
    strategy = tournament if selection_strategy is None else selection_strategy
    options = Options.check(
        max_steps=max_steps, num_epochs=num_epochs, evaluation_interval=evaluation_interval, eval_batches=eval_batches,
        evo_steps=evo_steps, checkpoint_steps=checkpoint_steps, checkpoint_path=checkpoint_path, checkpoints=checkpoints,
        save_elite=save_elite, elite_path=elite_path, keep_last=keep_last, keep_best=keep_best, lora_only=lora_only,
        save_optimizer=save_optimizer, async_save=async_save, on_save_error=on_save_error, has_selection=strategy is not None,
        has_two_selections=tournament is not None and selection_strategy is not None, has_mutation=mutation is not None,
        num_env_sources=(env is not None) + (env_fn is not None),
    )  # fmt: skip

    logging = {
        "verbose": verbose, "wb": wb, "wandb_api_key": wandb_api_key, "wandb_kwargs": wandb_kwargs, "csv": csv,
        "csv_log_dir": csv_log_dir, "tensorboard": tensorboard, "tensorboard_log_dir": tensorboard_log_dir,
        "sinks": sinks, "metadata": init_hp or {},
    }  # fmt: skip
    with open_env(env, env_fn) as rows:
        check_population(pop, rows, strategy)
        warn_about_init_hp(init_hp, pop)
        with open_run(pop, rows, options, selection=strategy, mutation=mutation, logging=logging) as run:
            if not run.resume(resume) and run.evolution is not None:
                run.evolution.begin(run.trainees, mutate=pre_training_mut)
            _train(run)
            settle(rows, fittest(run.trainees).reader)
            return [trainee.agent for trainee in run.trainees], [trainee.fitness for trainee in run.trainees]


def _train(run: Run) -> None:
    """Spend the budget, measure everyone on everything, save."""
    while not run.is_spent:
        run.iteration += 1
        run.is_finished = False
        for trainee in run.trainees:
            if run.budget.room(trainee, wanted=1):
                trainee.train(run.budget, run.iteration, run.log)
        if not run.is_spent:
            _between_iterations(run)
        run.stop_if_asked()
    try:
        run.evaluation.measure(run.trainees, run.iteration, everything=True)
    except EvaluationStopped:
        run.stop_if_asked()  # saves; a resumed run has nothing left but this evaluation
    if run.is_finished and run.is_saved:
        return  # a finished run was resumed without a larger budget: all is on the disk already
    if run.evolution is not None and not run.is_finished:
        run.evolution.end(run.trainees, fittest(run.trainees))
    run.is_finished = True
    run.keeper.save_elite(run.trainees)
    run.save()


def _between_iterations(run: Run) -> None:
    """Measure, save and evolve where it is time to; what is selected or saved as elite was measured just before."""
    evolves = run.evolution is not None and run.evolution.is_due(run.iteration)
    saves = run.keeper.is_due(run.trainees)
    saves_several = saves and len(run.trainees) > 1
    if run.evaluation.is_due(run.iteration) or evolves or saves_several:
        run.evaluation.measure(run.trainees, run.iteration)
    if saves_several:
        run.keeper.hold_elite(run.trainees)
    if run.evolution is not None and evolves:
        run.keeper.save_elite(run.trainees)
        run.trainees = run.evolution.advance(run.trainees, run.iteration)
    if saves:
        run.save()
