"""FSDPConfig: every field is checked, all problems are told together, what is not there is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from agilerl.distributed import FSDPConfig
from agilerl.errors import ConfigError, UnsupportedError

DEFAULTS = {
    "reshard_after_forward": True,
    "cpu_offload": False,
    "optim_cpu_offload": None,
    "defer_grad_sync": True,
    "param_dtype": "bfloat16",
    "reduce_dtype": "float32",
    "prefetch_units": 1,
    "backward_prefetch_units": 1,
    "checkpoint_skip_layer_types": (),
    "checkpoint_every_n_blocks": 1,
    "wrap_every_n_blocks": 1,
    "param_persistence_threshold": 100_000,
    "ep": 1,
    "ep_token_blocks": 1,
    "routed_expert_chunk_mib": None,
    "tp": 1,
    "shard_group_size": None,
}


def test_fields_and_defaults() -> None:
    assert {field.name: field.default for field in dataclasses.fields(FSDPConfig)} == DEFAULTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reshard_after_forward", 1),
        ("cpu_offload", "yes"),
        ("optim_cpu_offload", 0),
        ("defer_grad_sync", None),
        ("param_dtype", "int8"),
        ("reduce_dtype", "bf16"),
        ("prefetch_units", -1),
        ("backward_prefetch_units", 1.5),
        ("checkpoint_skip_layer_types", "full_attention"),
        ("checkpoint_every_n_blocks", 0),
        ("wrap_every_n_blocks", True),
        ("param_persistence_threshold", -1),
        ("tp", 0),
        ("shard_group_size", 0),
    ],
)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        FSDPConfig(**{field: value})  # type: ignore[arg-type]


def test_all_problems_are_told_together() -> None:
    with pytest.raises(ValueError, match=r"param_dtype.*tp must be"):
        FSDPConfig(param_dtype="int8", tp=0)


@pytest.mark.parametrize("field", ["ep", "ep_token_blocks", "routed_expert_chunk_mib"])
def test_expert_parallelism_is_refused(field: str) -> None:
    with pytest.raises(UnsupportedError, match=field):
        FSDPConfig(**{field: 2})  # type: ignore[arg-type]


def test_a_contradiction_is_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts"):
        FSDPConfig(cpu_offload=True, optim_cpu_offload=False)
    assert FSDPConfig(cpu_offload=True).offloads_optimizer
    assert not FSDPConfig().offloads_optimizer


def test_round_trip_and_unknown_names() -> None:
    config = FSDPConfig(tp=2, checkpoint_skip_layer_types=("LlamaDecoderLayer",))
    assert FSDPConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="no field tensor_parallel"):
        FSDPConfig.from_dict({"tensor_parallel": 2})


def test_settings_need_no_torch() -> None:
    code = "import sys; from agilerl.distributed import FSDPConfig; FSDPConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
