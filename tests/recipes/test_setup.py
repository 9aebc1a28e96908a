from __future__ import annotations

import types

import pytest

from agilerl.config import load_config
from agilerl.errors import ConfigError
from agilerl.recipes.device import pick_device, pick_dtype
from agilerl.recipes.setup import _ranges, _schedule, evolution_of, lora_config, total_rows


def env_of(rows):
    return types.SimpleNamespace(reader=types.SimpleNamespace(num_rows=rows))


def config_of(*overrides):
    return load_config(None, overrides).config


@pytest.mark.parametrize(
    ("settings", "rows", "steps"),
    [
        (["training.epochs=2", "sft.batch_size=4"], 10, 6),  # ceil(10 / 4) in each pass
        (["training.max_steps=25", "sft.batch_size=4"], 10, 8),  # two passes and 5 rows of a third
        (["training.max_steps=8", "sft.batch_size=4"], None, 2),  # a stream
        (["sft.batch_size=16"], 9, 1),
    ],
)
def test_a_schedule_counts_the_updates_of_the_run(settings, rows, steps):
    config = config_of("sft.schedule=cosine", *settings)
    schedule = _schedule(config, config.sft, env_of(rows))
    assert schedule is not None
    assert schedule.num_steps == steps


def test_a_schedule_over_a_stream_needs_a_length():
    config = config_of("sft.schedule=cosine")
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        _schedule(config, config.sft, env_of(None))
    assert _schedule(config_of(), config_of().sft, env_of(None)) is None


def test_total_rows():
    assert total_rows(config_of("training.epochs=3"), env_of(7)) == 21
    assert total_rows(config_of(), env_of(7)) == 7
    assert total_rows(config_of("training.max_steps=5"), env_of(None)) == 5
    assert total_rows(config_of(), env_of(None)) is None


def test_searched_ranges_have_the_types_of_their_settings():
    config = config_of("evolution.ranges={lr: {min: 1e-6, max: 1e-3}, batch_size: {min: 4, max: 32}}")
    ranges = _ranges(config.evolution, config.sft)
    assert ranges["batch_size"].dtype is int
    assert ranges["lr"].dtype is float
    assert (ranges["lr"].min, ranges["lr"].max) == (1e-6, 1e-3)
    assert list(_ranges(config_of().evolution, config.sft)) == ["lr"]


def test_generations_are_spread_over_the_run():
    config = config_of("evolution.population_size=2", "evolution.generations=3")
    assert evolution_of(config, total=160, batch_size=4)["evo_steps"] == 10
    with pytest.raises(ConfigError, match="known number of rows"):
        evolution_of(config, total=None, batch_size=4)
    assert evolution_of(config_of(), total=160, batch_size=4) == {}


def test_lora_settings_reach_peft():
    config = lora_config(config_of("lora.rank=4", "lora.alpha=8", "lora.rslora=yes", "lora.dropout=0.1").lora)
    assert (config.r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (4, 8, True, 0.1)
    assert lora_config(config_of("lora.enabled=no").lora) is None


def test_devices_and_types(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    assert pick_dtype("auto", "cpu") == "float32"
    assert pick_dtype("bfloat16", "cpu") == "bfloat16"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="no CUDA device"):
            pick_device(name)
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda"):
        pick_device("tpu9")
