from __future__ import annotations

import re

import pytest

from agilerl.config import RunConfig, load_config
from agilerl.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem_of(tmp_path, text, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", '"1e-5"', "'1e-5'", "0.00001", "1.E-5", "+1e-5"])
def test_every_way_to_write_a_small_number(tmp_path, text):
    assert load_config(write(tmp_path, f"sft:\n  lr: {text}\n")).config.sft.lr == 1e-5
    assert load_config(None, [f"sft.lr={text}"]).config.sft.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "value"), [("no", False), ("off", False), ("yes", True), ("on", True), ("false", False)]
)
def test_switches_in_words(tmp_path, text, value):
    assert load_config(write(tmp_path, f"log:\n  csv: {text}\n")).config.log.csv is value


def test_no_stays_a_word_where_a_word_is_wanted(tmp_path):
    assert load_config(write(tmp_path, "output:\n  path: no\n")).config.output.path == "no"


def test_thousands_may_be_grouped(tmp_path):
    config = load_config(write(tmp_path, "training:\n  max_steps: 1_000\n")).config
    assert config.training.max_steps == 1000


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lr: -1", "sft.lr is -1, but must be greater than 0"),
        ("lr: nan", "sft.lr is nan, but must be a finite number"),
        ("lr: .inf", "sft.lr is .inf, but must be a valid number"),
        ("lr: inf", "sft.lr is inf, but must be a finite number"),
        ("lr: true", "sft.lr is true, but must be a valid number"),
        ("batch_size: 8.5", "sft.batch_size is 8.5, but must be a valid integer"),
        ("batch_size: 0", "sft.batch_size is 0, but must be greater than or equal to 1"),
        ("schedule: linear", "sft.schedule is linear, but must be 'constant' or 'cosine'"),
        ("lr: [1]", "sft.lr is ['1'], but must be a valid number"),
        ("lr:", "sft.lr is nothing, but must be a valid number"),
    ],
)
def test_bad_values_name_setting_value_and_rule(tmp_path, line, says):
    message = problem_of(tmp_path, f"sft:\n  {line}\n")
    assert message == f"One problem in run.yaml: line 2: {says}."


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("sft:\n  learning_rat: 1", "did you mean sft.lr?"),
        ("sft:\n  learning_rate: 1", "did you mean sft.lr?"),
        ("sft:\n  batch-size: 1", "did you mean sft.batch_size?"),
        ("sft:\n  btach_size: 1", "did you mean sft.batch_size?"),
        ("lora:\n  lr: 1", "it belongs in section sft: sft.lr"),
        ("lora:\n  num-epochs: 1", "it belongs in section training: training.epochs"),
        ("lora:\n  r: 1", "did you mean lora.rank?"),
        ("num_epochs: 1", "it belongs in section training: training.epochs"),
        ("trainig:\n  epochs: 1", "did you mean training?"),
        ("training:\n  zzzz: 1", "known here: epochs, max_steps"),
        ("data:\n  train:\n  - path: a\n    splitt: b", "did you mean data.train.0.split?"),
        ("evolution:\n  ranges:\n    lr: {minn: 1, max: 2}", "did you mean evolution.ranges.lr.min?"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tmp_path, text, near):
    assert near in problem_of(tmp_path, text + "\n")


def test_all_problems_are_told_at_once(tmp_path):
    message = problem_of(
        tmp_path,
        "sft:\n  lr: -1\n  lr: 2\n  batch_siz: 4\nlora:\n  rank: zero\n",
        overrides=["model.nam=x", "noequals", "lora.dropout=2"],
    )
    assert message.startswith("7 problems in run.yaml:\n")
    for part in (
        "sft.lr stands twice",
        "sft.lr is -1",
        "sft.batch_siz",
        "lora.rank is zero",
        "model.nam",
        "'noequals'",
    ):
        assert part in message
    assert "command line: lora.dropout is 2, but must be less than 1" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- sft\n- lora\n", "the file holds a list"),
        ("sft\n", "the file holds a single value"),
        ("sft: 3\n", "sft is 3, but must be a group of settings"),
        ("sft: [1]\n", "sft is ['1'], but must be a group of settings"),
        ("sft:\n  lr: 1\n  lr: 2\n", "line 3: sft.lr stands twice (first in line 2)"),
        ("sft: {}\nsft: {}\n", "sft stands twice"),
        ("sft: {lr: 1\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_run_description(tmp_path, text, says):
    assert says in problem_of(tmp_path, text)


def test_an_empty_section_means_its_defaults(tmp_path):
    assert load_config(write(tmp_path, "sft:\nlora:\n  rank: 4\n")).config.sft == RunConfig().sft


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="There is no file"):
        load_config(tmp_path / "nothing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "bytes.yaml")


def test_a_byte_order_mark_and_crlf_are_tolerated(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfsft:\r\n  lr: 1e-4\r\n")
    assert load_config(tmp_path / "run.yaml").config.sft.lr == 1e-4


def test_command_line_wins_and_sources_are_known(tmp_path):
    path = write(tmp_path, "sft:\n  lr: 1e-4\n  batch_size: 4\nmodel:\n  name: a\n")
    loaded = load_config(path, ["sft.lr=3e-4", "sft.lr=2e-4"], options={"model.name": "b", "output.path": None})
    assert (loaded.config.sft.lr, loaded.config.sft.batch_size, loaded.config.model.name) == (2e-4, 4, "b")
    assert loaded.source("sft.lr") == "command line"
    assert loaded.source("sft.batch_size") == "run.yaml:3"
    assert loaded.source("model.name") == "command line"
    assert loaded.source("output.path") == "default"
    assert ("sft.batch_size", "4", "run.yaml:3") in loaded.rows(only_given=True)


def test_settings_of_a_checkpoint_lie_below_file_and_command_line(tmp_path):
    base = RunConfig.model_validate({"sft": {"lr": 1e-3, "batch_size": 2}}).to_dict()
    loaded = load_config(write(tmp_path, "sft:\n  batch_size: 4\n"), base=base)
    assert (loaded.config.sft.lr, loaded.config.sft.batch_size) == (1e-3, 4)
    assert (loaded.source("sft.lr"), loaded.source("sft.batch_size")) == ("checkpoint", "run.yaml:2")


def test_overrides_reach_into_nested_settings():
    overrides = [
        "evolution.ranges.lr.min=1e-6",
        "evolution.ranges.lr.max=1e-3",
        "data.chat_template_kwargs.think=false",
    ]
    config = load_config(None, overrides).config
    assert config.evolution.ranges["lr"].max == 1e-3
    assert config.data.chat_template_kwargs == {"think": False}


def test_an_override_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match="is not a group of settings"):
        load_config(None, ["model.name=a", "model.name.b=c"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr=3", "'lr=3' names no section; it belongs in section sft: sft.lr"),
        ("learning_rat=3", "'learning_rat=3' names no section; did you mean sft.lr?"),
        ("sft.lr", "'sft.lr' is not a setting; write section.key=value"),
        ("sft.=1", "'sft.=1' is not a setting"),
        ("sft.lr=[1", "the value of sft.lr is not valid YAML"),
    ],
)
def test_overrides_that_are_none(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(None, [text])


def test_a_list_and_a_quoted_number_survive_the_command_line():
    config = load_config(
        None, ["lora.target_modules=[q_proj, v_proj]", 'data.chat_template_kwargs={a: "1", b: 1}']
    ).config
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.data.chat_template_kwargs == {"a": "1", "b": 1}


def test_sources_may_be_a_text_or_a_list():
    config = load_config(None, ["data.train=a.jsonl", "data.test=[b.jsonl, {path: c, weight: 2}]"]).config
    assert [source.path for source in config.data.train or []] == ["a.jsonl"]
    assert [(source.path, source.weight) for source in config.data.test or []] == [("b.jsonl", None), ("c", 2.0)]


def test_contradicting_settings_are_refused():
    with pytest.raises(ConfigError, match="epochs and max_steps are both set"):
        load_config(None, ["training.epochs=1", "training.max_steps=10"])
    with pytest.raises(ConfigError, match="min 2 is larger than max 1"):
        load_config(None, ["evolution.ranges.lr={min: 2, max: 1}"])
    with pytest.raises(ConfigError, match=r"ranges\.rank cannot be searched"):
        load_config(None, ["evolution.ranges.rank={min: 1, max: 2}"])


def test_a_later_place_replaces_the_other_way_to_say_it(tmp_path):
    path = write(tmp_path, "training:\n  epochs: 3\nevolution:\n  evo_steps: 4\n")
    config = load_config(path, ["training.max_steps=64", "evolution.generations=2"]).config
    assert (config.training.epochs, config.training.max_steps) == (None, 64)
    assert (config.evolution.evo_steps, config.evolution.generations) == (None, 2)
    base = RunConfig.model_validate({"training": {"max_steps": 10}}).to_dict()
    config = load_config(path, ["evolution.evo_steps=null", "evolution.generations=2"], base=base).config
    assert (config.training.epochs, config.training.max_steps) == (3, None)


def test_the_effective_description_loads_to_the_same_run(tmp_path):
    loaded = load_config(
        None,
        [
            'model.name="123"',
            "sft.lr=2e-5",
            "data.train=[{path: x, weight: 0.5}]",
            'data.chat_template_kwargs={a: "no"}',
        ],
    )
    assert load_config(write(tmp_path, loaded.to_yaml())).config == loaded.config


@pytest.mark.parametrize("name", ["model.name", "data.train", "output.path"])
def test_empty_names_are_refused(name):
    with pytest.raises(ConfigError, match="is empty, but must be given"):  # an unset variable of a shell script
        load_config(options={name: ""})
