"""Every documented member of ``SFT``: it exists, is what it is documented to be, and takes these parameters."""

from __future__ import annotations

import inspect

import pytest

from agilerl.algorithms import SFT
from agilerl.algorithms.core.base import EvolvableAlgorithm, LLMAlgorithm

REQUIRED = inspect.Parameter.empty

CONSTRUCTOR = {
    "pad_token_id": REQUIRED, "pad_token": REQUIRED, "model_name": None, "actor_network": None, "model_config": None,
    "hp_config": None, "index": 0, "batch_size": 16, "lr": 5e-5, "max_grad_norm": 0.1, "update_epochs": 1,
    "calc_position_embeddings": True, "micro_batch_size_per_gpu": None, "mini_batch_size": None, "device": "cpu",
    "lora_config": None, "fsdp_config": None, "wrap": True, "clone": False, "seed": 42, "gradient_checkpointing": True,
    "use_liger_loss": True, "chunk_rows": None, "use_separate_reference_adapter": False, "quantization_config": None,
    "activation_offload": False, "moe_lora_recompute": None, "lora_target_scope": None,
}  # fmt: skip

METHODS = {
    "add_scores": {"scores": REQUIRED},
    "apply_lr": {},
    "clean_up": {},
    "clone": {"index": None, "wrap": True},
    "configure_batch_size_per_process": {
        "batch_size": REQUIRED, "micro_batch_size_per_gpu": REQUIRED, "mini_batch_size": REQUIRED, "group_size": 1,
    },
    "copy_attributes": {"agent": REQUIRED, "clone": REQUIRED, "exclude": ()},
    "eval_policy_network_ids": {},
    "evolvable_attributes": {"networks_only": False},
    "finalize_training_step": {"num_steps": REQUIRED},
    "get_action": {"args": REQUIRED, "kwargs": REQUIRED},
    "get_action_dim": {"action_space": REQUIRED},
    "get_eval_modules": {"cloning": True},
    "get_lr_names": {},
    "get_policy": {},
    "get_state_dim": {"observation_space": REQUIRED},
    "init_training_step": {"capture_grama": False},
    "inspect_attributes": {"agent": REQUIRED, "input_args_only": False, "exclude": ()},
    "learn": {"experiences": REQUIRED, "training": True},
    "load": {"path": REQUIRED, "device": "cpu", "accelerator": None},
    "load_checkpoint": {
        "path": REQUIRED, "load_optimizer": False, "overwrite_reference_adapter": None, "overwrite_critic_adapter": False,
        "restore_config": True, "restore_hyperparameters": True,
    },
    "load_weights": {"path": REQUIRED, "overwrite_reference_adapter": None, "overwrite_critic_adapter": False},
    "mutation_hook": {},
    "population": {"size": REQUIRED, "device": "cpu", "resume_from_checkpoint": None, "kwargs": REQUIRED},
    "preprocess_observation": {"observation": REQUIRED},
    "recompile": {},
    "register_mutation_hook": {"hook": REQUIRED},
    "register_network_group": {"group": REQUIRED},
    "reinit_optimizers": {"optimizer": None},
    "save_checkpoint": {"path": REQUIRED, "lora_only": True, "save_optimizer": True},
    "select_adapter": {"adapter_name": REQUIRED},
    "set_reference_policy": {"reference_update_tracker": REQUIRED},
    "set_training_mode": {"training": REQUIRED},
    "snapshot_checkpoint": {"lora_only": True, "save_optimizer": True},
    "test": {"env": REQUIRED, "loop": 1, "args": REQUIRED, "kwargs": REQUIRED},
    "to_device": {"experiences": REQUIRED},
    "unrolled_eval_networks": {},
    "unwrap_models": {},
    "update_existing_adapter": {"checkpoint_dir": REQUIRED, "adapter_name": REQUIRED},
    "update_lr": {"optimizer": REQUIRED, "lr": REQUIRED, "scheduler_config": None, "schedule_step": 0},
    "use_adapter": {"adapter_name": REQUIRED},
    "wrap_models": {},
}  # fmt: skip

STATIC = ("copy_attributes", "get_action_dim", "get_state_dim", "inspect_attributes", "update_lr")
CLASS = ("load", "population")
READ_ONLY = ("current_lr", "current_lr_critic", "lr_schedule_step")
SETTABLE = ("fitness", "hp_config", "index", "mut", "scores", "steps")


def parameters(function) -> dict[str, object]:
    """Positional parameters with their defaults; what is ours comes after them, by keyword only."""
    found = {name: parameter for name, parameter in inspect.signature(function).parameters.items() if name != "self"}
    ours = [p for p in found.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is not REQUIRED for p in ours)
    return {name: parameter.default for name, parameter in found.items() if parameter not in ours}


def test_constructor_parameters_in_order_with_defaults():
    found = inspect.signature(SFT).parameters
    ours = list(found)[len(CONSTRUCTOR) :]
    assert {name: found[name].default for name in list(found)[: len(CONSTRUCTOR)]} == CONSTRUCTOR
    assert list(found)[: len(CONSTRUCTOR)] == list(CONSTRUCTOR)
    assert all(found[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours)
    assert all(found[name].default is not REQUIRED for name in ours)


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_documented_parameters(name):
    found = parameters(getattr(SFT, name))
    assert found == METHODS[name]
    assert list(found) == list(METHODS[name])
    assert getattr(SFT, name).__doc__


def test_static_and_class_methods():
    for name in STATIC:
        assert isinstance(inspect.getattr_static(SFT, name), staticmethod), name
    for name in CLASS:
        assert isinstance(inspect.getattr_static(SFT, name), classmethod), name


@pytest.mark.parametrize("name", READ_ONLY + SETTABLE)
def test_properties(name):
    member = inspect.getattr_static(SFT, name)
    assert isinstance(member, property)
    assert member.__doc__
    assert (member.fset is not None) == (name in SETTABLE)


def test_the_two_shells():
    assert issubclass(SFT, LLMAlgorithm)
    assert issubclass(LLMAlgorithm, EvolvableAlgorithm)
