"""Numbers of any origin become plain data, in torch files and in strict JSON."""

from __future__ import annotations

import collections
import enum
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from agilerl.checkpoint import CheckpointContent, base_fingerprint, json_safe, plain, same_base, write_checkpoint
from agilerl.errors import CheckpointError
from tests.helpers import tiny_model


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")

CASES = [
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (True, True),
    (Colour.RED, "red"),
    (torch.float32, "float32"),
    (torch.device("cpu"), "cpu"),
    (Path("a/b"), "a/b"),
    (Text("x"), "x"),
    ({"b", "a"}, ["a", "b"]),
    (Pair(1, np.float64(2)), (1, 2.0)),
    (collections.OrderedDict(a=(1, [np.int8(2)])), {"a": (1, [2])}),
    (np.array(["a", "b"]), ["a", "b"]),
    (range(3), [0, 1, 2]),
]


@pytest.mark.parametrize(("value", "wanted"), CASES)
def test_plain(value: object, wanted: object) -> None:
    found = plain(value)
    assert found == wanted
    assert type(found) is type(wanted)


def test_arrays_and_generator_states_load_safely(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    state = {
        "numpy": generator.bit_generator.state,
        "old": np.random.RandomState(1).get_state(),
        "torch": torch.get_rng_state(),
    }
    write_checkpoint(CheckpointContent("SFT", state=state), tmp_path)
    back = torch.load(tmp_path / "attributes.pt", weights_only=True)["state"]
    again = np.random.default_rng()
    again.bit_generator.state = back["numpy"]
    assert again.integers(0, 1 << 62) == generator.integers(0, 1 << 62)
    assert torch.equal(back["torch"], state["torch"])


def test_parameters_lose_their_class() -> None:
    assert type(plain(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor


def test_anything_else_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"settings.a\[1\] is a builtins.object"):
        plain({"a": [1, object()]}, "settings")


def test_json_has_no_nan() -> None:
    value = {"nan": float("nan"), "inf": np.float32("inf"), "tensor": torch.tensor([1.0, float("nan")]), 3: (1, 2)}
    text = json.dumps(json_safe(value), allow_nan=False)
    assert json.loads(text) == {"nan": None, "inf": None, "tensor": [1.0, None], "3": [1, 2]}


def test_fingerprints_see_the_base_and_nothing_else() -> None:
    model = tiny_model("llama", seed=0)
    known = base_fingerprint(model)
    assert same_base(known, base_fingerprint(tiny_model("llama", seed=0))) is True
    assert same_base(known, base_fingerprint(tiny_model("llama", seed=1))) is False
    assert same_base(known, base_fingerprint(tiny_model("llama", seed=0).to(torch.bfloat16))) is True
    wide = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    assert same_base(known, base_fingerprint(get_peft_model(tiny_model("llama", seed=0), wide))) is True
    assert same_base(known, None) is None
    assert same_base(known, "2:a:b") is None
    merged = tiny_model("llama", seed=0)
    merged.model.layers[0].self_attn.q_proj.weight.data += 0.1
    assert same_base(known, base_fingerprint(merged)) is False


def test_fingerprints_of_quantised_bases_compare_by_what_stays() -> None:
    model = tiny_model("llama", seed=0)
    known = base_fingerprint(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features != 128:
            module.weight = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    assert base_fingerprint(model).endswith(":quantised")
    assert same_base(known, base_fingerprint(model)) is True
    model.model.norm.weight.data += 1
    assert same_base(known, base_fingerprint(model)) is False
