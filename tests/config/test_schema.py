from __future__ import annotations

import pytest
from pydantic import ValidationError

from agilerl.config.names import sections_of
from agilerl.config.schema import RunConfig

SECTIONS = sections_of(RunConfig)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_setting_is_documented(name):
    undocumented = [key for key, field in SECTIONS[name].model_fields.items() if not field.description]
    assert not undocumented
    assert SECTIONS[name].__doc__


@pytest.mark.parametrize("name", SECTIONS)
def test_names_known_from_elsewhere_lead_to_real_fields(name):
    cls = SECTIONS[name]
    assert set(cls.other_names.values()) <= set(cls.model_fields)
    assert not set(cls.other_names) & set(cls.model_fields)


def test_defaults_of_sft_are_those_of_the_algorithm():
    sft = RunConfig().sft
    assert (sft.lr, sft.batch_size, sft.max_grad_norm, sft.update_epochs) == (5e-5, 16, 0.1, 1)
    assert (RunConfig().dpo.lr, RunConfig().dpo.beta, RunConfig().dpo.nll_alpha) == (5e-6, 0.1, 1.0)


def test_descriptions_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().sft.lr = 1.0  # type: ignore[misc]


def test_changed_lists_only_what_differs():
    assert RunConfig.model_validate({"sft": {"lr": 1e-3, "batch_size": 16}}).sft.changed() == {"lr": 1e-3}
