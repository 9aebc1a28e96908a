from __future__ import annotations

import math

import pytest

from agilerl.config.yaml import Plain, dump, parse, typed


def test_scalars_keep_their_text_until_a_type_is_known():
    value = parse("a: 2e-5\nb: no\nc: 1_000\nd: '2e-5'\ne:\nf: ~\ng: null\nh: 'null'").value
    assert value == {"a": "2e-5", "b": "no", "c": "1_000", "d": "2e-5", "e": None, "f": None, "g": None, "h": "null"}
    assert isinstance(value["a"], Plain)
    assert not isinstance(value["d"], Plain)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-7", -7),
        ("1_000", 1000),
        ("2e-5", 2e-5),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("no", "no"),
    ],
)
def test_typed_follows_yaml_1_2(text, value):
    result = typed(Plain(text))
    assert result == value
    assert type(result) is type(value)


def test_typed_leaves_quoted_text_alone():
    assert typed({"a": ["1", Plain("1")]}) == {"a": ["1", 1]}


def test_duplicate_keys_are_problems_with_both_lines():
    document = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert document.problems == ["line 4: a.b stands twice (first in line 2); keep one"]


def test_line_numbers_reach_into_lists():
    document = parse("a:\n- b: 1\n- c: 2\n")
    assert document.lines == {"a": 1, "a.0.b": 2, "a.1.c": 3}


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: b: c", "\t- a", "a: !!python/object:os.system {}\n b: 1", "a: *nowhere"]
)
def test_broken_yaml_is_one_sentence(text):
    (problem,) = parse(text).problems
    assert "not valid YAML" in problem
    assert "\n" not in problem


def test_tags_do_not_construct_objects():
    document = parse("a: !!python/object/apply:os.getcwd []")
    assert document.value == {"a": []}


def test_an_alias_of_itself_ends():
    assert parse("a: &x\n  b: *x\n").problems == ["line 1: an alias that contains itself"]


def test_dump_and_parse_are_inverse_for_awkward_text():
    settings = {
        "s": {"a": "2e-5", "b": "no", "c": "null", "d": "", "e": 1e-05, "f": "true", "g": [1, "1"], "h": "x: y #"}
    }
    assert typed(parse(dump(settings)).value) == settings


def test_dump_refuses_what_cannot_be_set():
    with pytest.raises(ValueError, match="finite"):
        dump({"a": math.nan})
