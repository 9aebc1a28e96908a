from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from agilerl.algorithms.core.registry import (
    HyperparameterConfig,
    MutationRegistry,
    NetworkGroup,
    OptimizerConfig,
    RLParameter,
    make_default_hp_config,
)


def test_ints_always_move_by_at_least_one_and_stay_in_bounds():
    parameter = RLParameter(1, 10, dtype=int)
    for value in range(1, 11):
        for grow in (True, False):
            moved = parameter.moved(value, grow=grow)
            assert isinstance(moved, int)
            assert 1 <= moved <= 10
            assert moved != value
    assert parameter.moved(5, grow=True) == 6
    assert parameter.moved(5, grow=False) == 4
    assert RLParameter(1, 100, shrink_factor=0.5, grow_factor=2.0, dtype=int).moved(8, grow=False) == 4


def test_at_a_bound_the_move_goes_the_other_way():
    parameter = RLParameter(1.0, 2.0)
    assert parameter.moved(2.0, grow=True) == pytest.approx(1.6)
    assert parameter.moved(1.0, grow=False) == pytest.approx(1.2)
    assert RLParameter(3, 3, dtype=int).moved(3, grow=True) == 3


def test_a_value_outside_the_bounds_is_brought_inside():
    assert RLParameter(1e-4, 1e-2).moved(1.0, grow=True) == pytest.approx(0.8e-2)


def test_steps_keep_multiples_of_the_rank_count():
    parameter = RLParameter(1, 64, dtype=int)
    for value in (3, 4, 7, 8, 61, 64):
        for grow in (True, False):
            moved = parameter.moved(value, grow=grow, step=4)
            assert moved % 4 == 0
            assert moved != value
            assert 1 <= moved <= 64


def test_mutate_starts_from_value_and_keeps_the_result():
    parameter = RLParameter(0.0, 100.0)
    with pytest.raises(ValueError, match="no value yet"):
        parameter.mutate()
    parameter.value = 10.0
    result = parameter.mutate(rng=np.random.default_rng(0))
    assert result == parameter.value
    assert result in (8.0, 12.0)


def test_mutate_leaves_global_generators_alone():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    RLParameter(0.0, 1.0).mutate(0.5)
    HyperparameterConfig(lr=RLParameter(0.0, 1.0)).sample()
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"min": 2, "max": 1}, "above its max"),
        ({"min": 0, "max": math.inf}, "finite"),
        ({"min": 0.5, "max": 3, "dtype": int}, "whole"),
        ({"min": 0, "max": 1, "shrink_factor": 1.2}, "shrink_factor"),
        ({"min": 0, "max": 1, "grow_factor": 0.9}, "grow_factor"),
        ({"min": 0, "max": 1, "dtype": str}, "float or int"),
    ],
)
def test_bad_ranges_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        RLParameter(**kwargs)


def test_config_access_and_emptiness():
    lr, size = RLParameter(1e-5, 1e-3), RLParameter(1, 8, dtype=int)
    config = HyperparameterConfig(lr=lr, batch_size=size)
    assert config.lr is lr
    assert config["batch_size"] is size
    assert config.names() == ["lr", "batch_size"]
    assert config.items() == [("lr", lr), ("batch_size", size)]
    assert config
    assert not HyperparameterConfig()
    assert {config.sample(np.random.default_rng(seed))[0] for seed in range(20)} == {"lr", "batch_size"}
    with pytest.raises(AttributeError, match="lr, batch_size"):
        _ = config.nothing
    with pytest.raises(KeyError, match="nothing"):
        config["nothing"]
    with pytest.raises(ValueError, match="must be an RLParameter"):
        HyperparameterConfig(lr=1e-3)
    with pytest.raises(ValueError, match="No mutable"):
        HyperparameterConfig().sample()


def test_config_copies_and_round_trips():
    config = make_default_hp_config(lr=1e-3, batch_size=16)
    for twin in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        HyperparameterConfig.from_dict(config.to_dict()),
    ):
        assert twin == config
        assert twin.lr is not config.lr
        assert twin.lr.value == 1e-3


def test_defaults_around_present_values():
    config = make_default_hp_config(lr=1e-3, batch_size=16, update_epochs=1)
    assert (config.lr.min, config.lr.max) == (pytest.approx(1e-4), pytest.approx(1e-2))
    assert (config.lr.shrink_factor, config.lr.grow_factor) == (0.8, 1.2)
    assert (config.batch_size.min, config.batch_size.max, config.batch_size.dtype) == (4, 64, int)
    assert (config.batch_size.shrink_factor, config.batch_size.grow_factor) == (0.75, 1.5)
    assert (config.update_epochs.min, config.update_epochs.max) == (1, 4)
    for bad in (0, -1.0, True, "1", math.nan):
        with pytest.raises(ValueError, match="positive finite"):
            make_default_hp_config(x=bad)


def test_registry_declares_names_only():
    registry = MutationRegistry()
    registry.register_group(NetworkGroup("actor", shared_networks="target", policy=True))
    registry.register_optimizer(OptimizerConfig("optimizer", "actor", "lr", object, {}))
    registry.register_hook("apply_lr")
    assert registry.policy == "actor"
    assert registry.networks == ["actor", "target"]
    assert registry.lr_names == ["lr"]
    assert registry.hooks == ["apply_lr"]
    assert not registry.hp_config
    with pytest.raises(ValueError, match="registered already"):
        registry.register_group(NetworkGroup("actor"))
    with pytest.raises(ValueError, match="policy already"):
        registry.register_group(NetworkGroup("other", policy=True))
    with pytest.raises(ValueError, match="unregistered network critic"):
        registry.register_optimizer(OptimizerConfig("second", "critic", "lr", object, {}))
    with pytest.raises(ValueError, match="callable or a method name"):
        registry.register_hook(3)
