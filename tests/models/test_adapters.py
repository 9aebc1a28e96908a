"""Adapters by role."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from agilerl.errors import CheckpointError, ModelError
from agilerl.models import Adapters, adopt_adapter, attach_lora, share_base
from tests.helpers import tiny_model

IDS = torch.arange(6, 20).reshape(2, 7)
KINDS = {
    "plain": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "lora_bias": {"lora_bias": True},
    "saved": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 4]}},
}


def lora(**settings: object) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **settings})  # type: ignore[arg-type]


def agent_model(**settings: object) -> PeftModel:
    return attach_lora(tiny_model("qwen2"), lora(**settings), seed=1)


def scramble(tensors: dict[str, Tensor], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator))


def logits(model: PeftModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_roles_switch_copy_and_come_back(kind: str) -> None:
    model = agent_model(**KINDS[kind])
    base = logits(model)
    adapters = Adapters(model)
    adapters.add("reference", seed=2)
    assert adapters.names == ("actor", "reference")
    assert adapters.active == "actor"
    scramble(adapters.read("actor"))
    changed = logits(model)
    assert not torch.allclose(changed, base)
    with adapters.select("reference"):
        torch.testing.assert_close(logits(model), base)
    with adapters.disabled():
        torch.testing.assert_close(logits(model), base)
    torch.testing.assert_close(logits(model), changed, rtol=0, atol=0)
    adapters.copy("actor", "reference")
    with adapters.select("reference"):
        torch.testing.assert_close(logits(model), changed, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_reference_is_frozen_whatever_is_active(kind: str) -> None:
    model = agent_model(**KINDS[kind])
    alone = trainable(model)
    adapters = Adapters(model)
    adapters.add("reference", seed=2)
    adapters.add("critic", seed=3)
    expected = alone | {name.replace("actor", "critic") for name in alone}
    assert trainable(model) == expected
    for role in adapters.names:
        with adapters.select(role):
            assert trainable(model) == expected
        with adapters.disabled():
            pass
        assert trainable(model) == expected


def test_the_role_comes_back_after_an_error() -> None:
    adapters = Adapters(agent_model())
    adapters.add("reference", seed=2)
    with pytest.raises(RuntimeError, match="inside"), adapters.select("reference"):
        raise RuntimeError("inside")
    assert adapters.active == "actor"
    with pytest.raises(RuntimeError, match="inside"), adapters.disabled():
        raise RuntimeError("inside")
    assert not any(getattr(module, "disable_adapters", False) is True for module in adapters.model.modules())


def test_selects_nest() -> None:
    adapters = Adapters(agent_model())
    adapters.add("reference", seed=2)
    adapters.add("critic", seed=2)
    with adapters.select("critic"):
        with adapters.select("reference"):
            assert adapters.active == "reference"
        assert adapters.active == "critic"
    assert adapters.active == "actor"


def test_unknown_and_double_roles_are_refused() -> None:
    adapters = Adapters(agent_model())
    for action in (adapters.activate, adapters.read, adapters.config):
        with pytest.raises(ValueError, match="no adapter 'critc'; the roles are actor"):
            action("critc")
    with pytest.raises(ModelError, match="'actor' already"):
        adapters.add("actor", seed=0)


def test_a_new_role_is_drawn_from_its_own_seed() -> None:
    first, second, third = (Adapters(agent_model()) for _ in range(3))
    state = torch.get_rng_state()
    for adapters, seed in ((first, 5), (second, 5), (third, 6)):
        adapters.add("critic", seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name in first.read("critic") if "lora_A" in name)
    assert torch.equal(first.read("critic")[name], second.read("critic")[name])
    assert not torch.equal(first.read("critic")[name], third.read("critic")[name])


@pytest.mark.parametrize("kind", KINDS)
def test_read_gives_the_names_and_bytes_that_peft_saves(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file

    model = agent_model(**KINDS[kind])
    adapters = Adapters(model)
    adapters.add("reference", seed=4)
    scramble(adapters.read("actor"))
    state = model.state_dict()  # given explicitly, because PEFT warns of the biases of lora_bias otherwise
    model.save_pretrained(tmp_path, selected_adapters=["actor"], save_embedding_layers=False, state_dict=state)
    saved = load_file(tmp_path / "actor" / "adapter_model.safetensors")
    read = adapters.read("actor")
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", KINDS)
def test_write_puts_back_what_was_read(kind: str) -> None:
    source, target = Adapters(agent_model(**KINDS[kind])), Adapters(agent_model(**KINDS[kind]))
    scramble(source.read("actor"))
    target.write("actor", {name: tensor.clone() for name, tensor in source.read("actor").items()})
    torch.testing.assert_close(logits(target.model), logits(source.model), rtol=0, atol=0)


def test_a_renamed_dropped_or_reshaped_tensor_is_named_and_nothing_is_written() -> None:
    adapters = Adapters(agent_model())
    good = {name: torch.ones_like(tensor) for name, tensor in adapters.read("actor").items()}
    before = logits(adapters.model)
    a, b, c = list(good)[:3]
    bad = dict(good)
    bad["renamed"] = bad.pop(a)
    del bad[b]
    bad[c] = torch.ones(7, 7)
    with pytest.raises(CheckpointError) as error:
        adapters.write("actor", bad)
    for part in (f"missing {a}", f"missing {b}", "unknown renamed", f"{c} has shape (7, 7)"):
        assert part in str(error.value)
    torch.testing.assert_close(logits(adapters.model), before, rtol=0, atol=0)


def test_another_rank_does_not_fit() -> None:
    other = Adapters(attach_lora(tiny_model("qwen2"), lora(r=3), seed=0))
    with pytest.raises(CheckpointError, match=r"shape \(3, 32\) instead of \(2, 32\)"):
        Adapters(agent_model()).write("actor", other.read("actor"))


def test_biases_of_the_base_cannot_be_shared_by_roles() -> None:
    adapters = Adapters(attach_lora(tiny_model("qwen2"), lora(bias="lora_only"), seed=0))
    assert any("bias" in name for name in adapters.read("actor"))
    with pytest.raises(ModelError, match="bias='none'"):
        adapters.add("reference", seed=0)
    with pytest.raises(ModelError, match="cannot be switched off"), adapters.disabled():
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_an_adopted_adapter_keeps_its_weights_under_the_name_actor(kind: str) -> None:
    twin = get_peft_model(tiny_model("qwen2", dtype=torch.float64), lora(**KINDS[kind]))
    scramble({name: p for name, p in twin.named_parameters() if p.requires_grad})
    names = [name for name, p in twin.named_parameters() if p.requires_grad]
    expected = logits(twin)
    model = adopt_adapter(twin)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [n.replace("default", "actor") for n in names]
    adapters = Adapters(model)
    assert adapters.names == ("actor",)
    adapters.add("reference", seed=1)
    adapters.copy("actor", "reference")
    with adapters.select("reference"):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-9, atol=1e-9)


def test_an_adapter_loaded_frozen_is_trained_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    source = agent_model()
    scramble(Adapters(source).read("actor"))
    source.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / "actor")
    assert not trainable(loaded)
    model = adopt_adapter(loaded)
    assert trainable(model) == trainable(source)
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_models_that_cannot_be_adopted_are_refused() -> None:
    two = get_peft_model(tiny_model("qwen2"), lora())
    two.add_adapter("second", lora())
    with pytest.raises(ModelError, match=r"2 adapters \(default, second\)"):
        adopt_adapter(two)
    merged = get_peft_model(tiny_model("qwen2"), lora())
    merged.merge_adapter()
    with pytest.raises(ModelError, match="merged"):
        adopt_adapter(merged)
    from peft import IA3Config

    other = get_peft_model(tiny_model("qwen2"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ModelError, match="IA3Config"):
        adopt_adapter(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_base_costs_only_the_adapters_and_trains_alone(kind: str) -> None:
    model = agent_model(**KINDS[kind])
    scramble(Adapters(model).read("actor"))
    expected = logits(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    twin = share_base(model)
    assert all(p.grad is grads.get(name) for name, p in model.named_parameters())
    assert all(p.grad is None for p in twin.parameters())
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine is theirs) == (not mine.requires_grad), name
        assert mine.requires_grad == theirs.requires_grad
    torch.testing.assert_close(logits(twin), expected, rtol=0, atol=0)
    scramble(Adapters(twin).read("actor"), seed=9)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    assert not torch.allclose(logits(twin), expected)


def test_a_full_model_is_copied_completely() -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    twin = share_base(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
