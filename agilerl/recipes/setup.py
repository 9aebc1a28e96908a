"""A run description -> tokenizer, data and agents. SFT and DPO share this; what differs is the class and its extra settings."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter, make_default_hp_config
from agilerl.checkpoint import read_checkpoint
from agilerl.config.data import DataSection, SourceConfig
from agilerl.config.evolution import EvolutionSection
from agilerl.config.schema import DPOSection, LoraSection, ModelSection, RunConfig, SFTSection
from agilerl.data.images import tokenizer_of
from agilerl.distributed import FSDPConfig, get_rank, get_world_size
from agilerl.errors import ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.llm_envs import make_env
from agilerl.models import load_base_model, load_tokenizer
from agilerl.models.build import resolve_name
from agilerl.models.quantization import build_bnb_quantization_config
from agilerl.optim import CosineLRScheduleConfig
from agilerl.recipes.device import pick_device, pick_dtype
from agilerl.recipes.images import scope_of
from agilerl.recipes.open import load_adapter

__all__ = [
    "build_agents",
    "build_env",
    "bundled",
    "evolution_of",
    "fsdp_config",
    "load_tokenizer_for",
    "lora_config",
    "model_limits",
    "starting_point",
    "total_rows",
]

DEMO_FOLDER = "outputs/demo"
"""Where the demonstration of `agilerl sft` leaves its model, which the one of `agilerl dpo` goes on from."""

_INT_SETTINGS = frozenset({"batch_size", "micro_batch_size_per_gpu", "mini_batch_size", "update_epochs"})


def starting_point(config: RunConfig) -> RunConfig:
    """Where ``model.name`` is a checkpoint of ours: its base model with the adapter to go on from, or its whole model.

    Raises:
        ConfigError: The checkpoint has no base model that could be found by name, or an adapter was named beside it.
    """
    folder = Path(config.model.name).expanduser()
    if not (folder / "attributes.pt").is_file():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ConfigError(_bare_adapter(folder))
        if config.model.name == DEMO_FOLDER and not folder.exists():
            raise ConfigError(f"There is no {DEMO_FOLDER} to go on from: run `agilerl sft` first, or give --model.")
        return config
    content = read_checkpoint(folder, need_optimizer=False)
    if content.full_model is not None:
        return _with_model(config, name=str(folder / "actor"))
    if "actor" not in content.adapters:
        raise ConfigError(f"{folder} holds its weights in one file, which no run can go on from: load it from Python.")
    base = content.settings.get("model_name") or content.base.get("name_or_path")
    if not base:
        raise ConfigError(f"{folder} was trained on a model without a name: give model.name and model.adapter.")
    if config.model.adapter is not None:
        raise ConfigError(f"model.name {folder} brings an adapter already; leave model.adapter out.")
    return _with_model(config, name=str(base), adapter=str(folder))


def _bare_adapter(folder: Path) -> str:
    found = f"{folder} holds an adapter alone, not a model"
    if (folder.parent / "attributes.pt").is_file():
        return f"{found}; name the run that it belongs to: {folder.parent}"
    return f"{found}; name its base model with --model and the adapter with model.adapter={folder}"


def _with_model(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=values)})


def build_env(
    config: RunConfig, tokenizer: Any, *, objective: str, model: str | None = None, processor: Any = None
) -> Any:
    """The data of a run, this process's share of it, cut to what the model can read.

    Args:
        config: The run.
        tokenizer: Encodes the rows.
        objective: "sft" or "preference".
        model: Name of the model in place of ``config.model.name``.
        processor: The model's processor, where rows have images.
    """
    max_positions, stop_ids = model_limits(model or config.model.name, config.model.trust_remote_code)
    tp = config.fsdp.tp if config.fsdp.enabled else 1
    data = config.data if config.data.train is not None else bundled(config.data, objective)
    return make_env(
        data,
        tokenizer,
        objective=objective,
        seed=config.training.seed,
        rank=get_rank() // tp,
        world_size=get_world_size() // tp,
        max_positions=max_positions,
        stop_ids=stop_ids,
        processor=processor,
    )


def model_limits(name: str, trust_remote_code: bool) -> tuple[int | None, list[int]]:
    """Positions that a model has, and the tokens that it stops at; read from its settings, without its weights."""
    path = resolve_name(name)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        return None, []  # whoever loads the model says what is wrong with it
    try:
        stops = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        stops = config.get_text_config().eos_token_id
    many: list[Any] = stops if isinstance(stops, list) else [stops]
    return getattr(config.get_text_config(), "max_position_embeddings", None), [
        int(one) for one in many if one is not None
    ]


def bundled(data: DataSection, objective: str) -> DataSection:
    """The demonstration set that comes with the package."""
    folder = files("agilerl").joinpath("assets", {"sft": "commands", "preference": "clarify"}[objective])
    train, test = ([SourceConfig(path=str(folder / f"{split}.jsonl"))] for split in ("train", "test"))
    return data.model_copy(update={"train": train, "test": data.test or test})


def total_rows(config: RunConfig, env: Any) -> int | None:
    """Rows that each agent trains; ``None`` for a stream whose length is not known."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    rows = env.reader.num_rows
    return None if rows is None else rows * (config.training.epochs or 1)


def build_agents(
    config: RunConfig, algorithm: type[Any], section: SFTSection | DPOSection, tokenizer: Any, env: Any
) -> list[Any]:
    """The population: one agent, or several on one frozen base."""
    device = pick_device(config.model.device)
    evolution = config.evolution
    settings = {
        name: value
        for name, value in section.model_dump().items()
        if name not in ("schedule", "warmup_proportion", "min_lr_ratio")
    }
    settings["use_liger_loss"] &= device.startswith("cuda")  # nobody has to be told that a CPU has no such kernel
    network = _network(config.model, device)
    words = tokenizer_of(tokenizer)  # where rows have images it is a processor
    quantization = build_bnb_quantization_config(config.model.quantization)
    shared: dict[str, Any] = {
        "pad_token_id": words.pad_token_id if words.pad_token_id is not None else words.eos_token_id,
        "pad_token": words.pad_token or words.eos_token,
        "lora_config": lora_config(config.lora) if network is None else None,
        "lora_target_scope": scope_of(config.model, config.lora.target_scope) if config.lora.enabled else None,
        "fsdp_config": fsdp_config(config),
        "seed": config.training.seed,
        "tokenizer": tokenizer,
        "cosine_lr_schedule_config": _schedule(config, section, env),
        "hp_config": _ranges(evolution, section) if evolution.population_size > 1 else None,
        **settings,
    }
    if network is None:
        shared |= {
            "model_name": config.model.name,
            "model_config": _model_config(config.model, device),
            "quantization_config": quantization,
        }
    else:
        shared["actor_network"] = network
    if evolution.population_size == 1:
        return [algorithm(device=device, **shared)]
    return algorithm.population(size=evolution.population_size, device=device, **shared)


def evolution_of(config: RunConfig, total: int | None, batch_size: int) -> dict[str, Any]:
    """Arguments of ``train_llm_dataset`` that make a population evolve; none for a single agent."""
    section = config.evolution
    if section.population_size == 1:
        return {}
    seed = config.training.seed if section.seed is None else section.seed
    interval = section.evo_steps or 10
    if section.generations is not None:
        if total is None:
            raise ConfigError(
                "evolution.generations needs a known number of rows; set training.max_steps or evo_steps."
            )
        interval = math.ceil(math.ceil(total / batch_size) / (section.generations + 1))
    chance = section.mutation_probability
    return {
        "evo_steps": interval,
        "selection_strategy": TournamentSelection(
            section.tournament_size, section.elitism, section.population_size, rand_seed=seed
        ),
        "mutation": Mutations(
            1.0 - chance, 0.0, 0.0, 0.0, 0.0, chance, mutate_elite=section.mutate_elite, rand_seed=seed
        ),
        "pre_training_mut": True,
    }


def _model_config(model: ModelSection, device: str) -> dict[str, Any]:
    config: dict[str, Any] = {"dtype": pick_dtype(model.dtype, device)}
    if model.revision is not None:
        config["revision"] = model.revision
    if model.attention is not None:
        config["attn_implementation"] = model.attention
    if model.trust_remote_code:
        config["trust_remote_code"] = True
    return config


def _network(model: ModelSection, device: str) -> Any:
    """A model with the adapter to go on from; ``None`` when the agent loads the model by name."""
    if model.adapter is None:
        return None
    base = load_base_model(
        model.name,
        model_config=_model_config(model, device),
        quantization_config=build_bnb_quantization_config(model.quantization),
    )
    return load_adapter(base, model.adapter, is_trainable=True)


def lora_config(section: LoraSection) -> Any:
    """PEFT's settings for a section; None trains every weight."""
    if not section.enabled:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type] - PEFT takes any number
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
        modules_to_save=section.modules_to_save,
        bias=section.bias,
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type="CAUSAL_LM",
    )


def fsdp_config(config: RunConfig) -> FSDPConfig | None:
    """How a run is sharded; None where it is not."""
    if not config.fsdp.enabled:
        return None
    return FSDPConfig(**config.fsdp.model_dump(exclude={"enabled"}))


def _schedule(config: RunConfig, section: SFTSection | DPOSection, env: Any) -> CosineLRScheduleConfig | None:
    if section.schedule == "constant":
        return None
    total = total_rows(config, env)
    if total is None:
        raise ConfigError("A cosine schedule needs a known number of rows; set training.max_steps.")
    rows = env.reader.num_rows or total
    passes, rest = divmod(total, rows)
    # The remainder of every pass makes a smaller step of its own.
    steps = passes * math.ceil(rows / section.batch_size) + math.ceil(rest / section.batch_size)
    return CosineLRScheduleConfig(steps, section.warmup_proportion, section.min_lr_ratio)


def _ranges(evolution: EvolutionSection, section: SFTSection | DPOSection) -> HyperparameterConfig:
    """What evolution may change; without ranges, the learning rate within a factor ten."""
    if not evolution.ranges:
        return make_default_hp_config(lr=section.lr)
    return HyperparameterConfig(
        **{
            name: RLParameter(
                min=int(bounds.min) if name in _INT_SETTINGS else bounds.min,
                max=int(bounds.max) if name in _INT_SETTINGS else bounds.max,
                shrink_factor=bounds.shrink_factor,
                grow_factor=bounds.grow_factor,
                dtype=int if name in _INT_SETTINGS else float,
            )
            for name, bounds in evolution.ranges.items()
        }
    )


def _tokenizer_place(model: ModelSection) -> str:
    """Where a chat template is saved with what was trained: beside the adapter, or above a checkpoint's whole model."""
    place = Path(model.name).expanduser()
    if model.adapter is not None:
        above = Path(model.adapter).expanduser()
    elif (place.parent / "attributes.pt").is_file() and not (place / "tokenizer_config.json").is_file():
        above = place.parent
    else:
        return model.name
    return str(above) if (above / "tokenizer_config.json").is_file() else model.name


def load_tokenizer_for(model: ModelSection) -> Any:
    """The tokenizer of a run's model; one without an end token cannot end an answer.

    Raises:
        ConfigError: There is no end token.
    """
    tokenizer = load_tokenizer(_tokenizer_place(model))
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer of {model.name} has no end token, so answers could not end; set one and save it."
        )
    return tokenizer
