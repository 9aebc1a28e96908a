"""Measure a model that lies on the disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agilerl.algorithms.sft import SFT
from agilerl.config import RunConfig, load_config
from agilerl.errors import ConfigError
from agilerl.recipes.describe import find_config
from agilerl.recipes.evaluation import Evaluation, evaluate
from agilerl.recipes.images import processor_for
from agilerl.recipes.open import open_model
from agilerl.recipes.report import Reporter
from agilerl.recipes.setup import build_env

__all__ = ["evaluate_model"]


def evaluate_model(
    name: str,
    overrides: Iterable[str] = (),
    *,
    data: str | None = None,
    base: str | None = None,
    device: str = "cpu",
    reporter: Reporter | None = None,
) -> Evaluation:
    """Held-out loss, perplexity and exact match of a checkpoint or model.

    Args:
        name: Anything that :func:`agilerl.recipes.open.open_model` opens.
        overrides: ``section.key=value`` texts.
        data: Rows to measure on, all of them; ``None``: the held-out rows of the run that made the checkpoint.
        base: Base model in place of the recorded one.
        device: Where to compute.
        reporter: Shows progress.

    Raises:
        ConfigError: There are no rows to measure on.
    """
    report = reporter or Reporter()
    config = _description(name, overrides, data)
    opened = open_model(
        name,
        base=base,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        quantization=config.model.quantization,  # as in training; a merged model has no run beside it
    )
    processor = processor_for(config, "sft", model=opened.base, saved=name)
    env = build_env(config, opened.tokenizer, objective="sft", model=opened.base, processor=processor)
    tokenizer = opened.tokenizer
    agent = SFT(
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        tokenizer.pad_token or tokenizer.eos_token,
        actor_network=opened.model,
        device=device,
        tokenizer=tokenizer,
        wrap=False,
        gradient_checkpointing=False,
        use_liger_loss=device.startswith("cuda"),  # nobody has to be told that a CPU has no such kernel
    )
    with report.answering("answering") as progress:
        return evaluate(agent, env, config.evaluation, progress=progress)


def _description(name: str, overrides: Iterable[str], data: str | None) -> RunConfig:
    saved = find_config(name)
    settings: dict[str, Any] = {}
    if saved is not None:
        settings = load_config(saved).config.to_dict()
    elif data is None:
        raise ConfigError(f"{name} has no run description beside it, so its held-out rows are not known; give --data.")
    if data is not None:
        # The same rows as both splits: every row is measured, none is trained.
        settings.setdefault("data", {}).update({"train": data, "test": data, "allow": ["overlap"]})
    return load_config(None, overrides, base=settings, base_name="run").config
