"""Parameter names, order and defaults of the documented interface. Parameters of ours may follow, with defaults.

The members of the agents are walked in tests/algorithms/test_documented_surface.py.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from agilerl.algorithms import DPO, SFT
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter, make_default_hp_config
from agilerl.distributed import FSDPConfig
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.llm_envs import DatasetEnv
from agilerl.training.llm import train_llm_dataset
from agilerl.utils.algo_utils import CosineLRScheduleConfig
from agilerl.utils.llm_utils import adapt_lora_config_for_model, build_bnb_quantization_config
from agilerl.utils.utils import save_llm_checkpoint

SFT_PARAMETERS = (
    "pad_token_id, pad_token, model_name=None, actor_network=None, model_config=None, hp_config=None, index=0, "
    "batch_size=16, lr=5e-5, max_grad_norm=0.1, update_epochs=1, calc_position_embeddings=True, "
    "micro_batch_size_per_gpu=None, mini_batch_size=None, device='cpu', lora_config=None, fsdp_config=None, wrap=True, "
    "clone=False, seed=42, gradient_checkpointing=True, use_liger_loss=True, chunk_rows=None, "
    "use_separate_reference_adapter=False, quantization_config=None, activation_offload=False, "
    "moe_lora_recompute=None, lora_target_scope=None"
)

FUNCTIONS: list[tuple[Callable[..., Any], str]] = [
    (SFT, SFT_PARAMETERS),
    (
        DatasetEnv,
        "train_dataset, test_dataset, tokenizer, *, objective, response_column='response', chat_template_kwargs=None, "
        "data_batch_size_per_gpu=8, max_context_length=None, min_completion_length=None, seed=42, rank=0, world_size=1",
    ),
    (
        train_llm_dataset,
        "pop, env=None, env_fn=None, init_hp=None, save_elite=None, elite_path=None, wb=False, tensorboard=False, "
        "tensorboard_log_dir=None, csv=False, csv_log_dir=None, evo_steps=None, checkpoint_steps=None, "
        "checkpoint_path=None, selection_strategy=None, tournament=None, mutation=None, wandb_api_key=None, "
        "wandb_kwargs=None, evaluation_interval=10, verbose=True, max_steps=None, num_epochs=None",
    ),
    (
        Mutations,
        "no_mutation, architecture, new_layer_prob, parameters, activation, rl_hp, mutation_sd=0.1, "
        "dormant_threshold=0.01, activation_selection=None, mutate_elite=True, rand_seed=None, device='cpu', "
        "accelerator=None",
    ),
    (Mutations.mutation, "self, population, pre_training_mut=False"),
    (TournamentSelection, "tournament_size, elitism, population_size"),
    (TournamentSelection.select, "self, population"),
    (RLParameter, "min, max, shrink_factor=0.8, grow_factor=1.2"),
    (CosineLRScheduleConfig, "num_steps, warmup_proportion=0.0, min_lr_ratio=0.1, actor_start_step=0"),
    (adapt_lora_config_for_model, "model, lora_config, lora_target_scope=None"),
    (build_bnb_quantization_config, "spec"),
    (save_llm_checkpoint, "agent, path=None"),
    (
        FSDPConfig,
        "reshard_after_forward=True, cpu_offload=False, optim_cpu_offload=None, defer_grad_sync=True, "
        "param_dtype='bfloat16', reduce_dtype='float32', prefetch_units=1, backward_prefetch_units=1, "
        "checkpoint_skip_layer_types=(), checkpoint_every_n_blocks=1, wrap_every_n_blocks=1, "
        "param_persistence_threshold=100_000, ep=1, ep_token_blocks=1, routed_expert_chunk_mib=None, tp=1, "
        "shard_group_size=None",
    ),
]


def documented(text: str) -> list[tuple[str, Any, bool]]:
    """Name, default (or ``empty``) and "by name only" of each parameter in ``text``."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    plain = [*arguments.args]
    missing = [inspect.Parameter.empty] * (len(plain) - len(arguments.defaults))
    defaults = [*missing, *(ast.literal_eval(value) for value in arguments.defaults)]
    found = [(one.arg, default, False) for one, default in zip(plain, defaults, strict=True)]
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((one.arg, inspect.Parameter.empty if value is None else ast.literal_eval(value), True))
    return found


def check(function: Callable[..., Any], text: str) -> None:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    actual = [one for one in inspect.signature(function).parameters.values() if one.kind in named]
    wanted = documented(text)
    found = [(one.name, one.default, one.kind is inspect.Parameter.KEYWORD_ONLY) for one in actual]
    assert found[: len(wanted)] == wanted
    ours = actual[len(wanted) :]
    assert all(one.default is not inspect.Parameter.empty for one in ours), "a parameter of ours has no default"


@pytest.mark.parametrize(("function", "text"), FUNCTIONS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_function(function: Callable[..., Any], text: str) -> None:
    check(function, text)


def test_dpo_is_sft_with_its_own_learning_rate_and_reference() -> None:
    text = SFT_PARAMETERS.replace("lr=5e-5", "lr=5e-6").replace(
        "use_separate_reference_adapter=False", "use_separate_reference_adapter=True"
    )
    names = {name for name, _, _ in documented(text)}
    actual = inspect.signature(DPO).parameters
    assert {name: (actual[name].default) for name in names} == {name: value for name, value, _ in documented(text)}
    assert (actual["beta"].default, actual["nll_alpha"].default) == (0.1, 1.0)


def test_hyperparameter_config_is_built_by_name() -> None:
    config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-3), batch_size=RLParameter(4, 64, dtype=int))
    assert list(config.names()) == ["lr", "batch_size"]
    assert not HyperparameterConfig()
    defaults = make_default_hp_config(lr=1e-4, batch_size=16)
    assert (defaults.lr.min, defaults.lr.max) == pytest.approx((1e-5, 1e-3))
    assert inspect.signature(RLParameter).parameters["dtype"].default is float
    assert (defaults["batch_size"].min, defaults["batch_size"].max) == (4, 64)
