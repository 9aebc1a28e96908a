"""Vision-language models: where adapters go, and that packing, padding and images compute what each row alone does."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from agilerl.distributed.skeleton import build_skeleton
from agilerl.errors import DataError, ModelError
from agilerl.models.build import load_base_model
from agilerl.models.extras import stack_inputs
from agilerl.models.head import final_hidden_states, find_head
from agilerl.models.lora import attach_lora
from agilerl.models.segments import Sample, choose_packer
from tests.helpers import VISION_FAMILIES, random_rows, tiny_vision_model

IMAGE = 120
QWEN = ("qwen2_vl", "qwen2_5_vl")


def image_row(family: str, seed: int) -> Sample:
    """A row of text, an image of four tokens and more text."""
    generator = torch.Generator().manual_seed(seed)
    before, after = (torch.randint(6, 100, (n,), generator=generator) for n in (2 + seed, 5))
    marks = [122] if family in QWEN else []
    ids = torch.cat([before, torch.tensor([*marks, *[IMAGE] * 4, *marks]), after])
    weights = torch.zeros(len(ids), dtype=torch.float64)
    weights[-5:] = 1.0
    if family in QWEN:
        extra = {
            "pixel_values": torch.randn(16, 96, generator=generator, dtype=torch.float64),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    elif family == "llava":
        extra = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)}
    else:
        extra = {
            "pixel_values": torch.randn(1, 1, 3, 16, 16, generator=generator, dtype=torch.float64),
            "pixel_attention_mask": torch.ones(1, 1, 16, 16, dtype=torch.long),
        }
    return Sample(ids, weights, extra)


def alone(model, sample: Sample) -> torch.Tensor:
    """Final hidden states of a row by itself, as the model's own forward pass computes them."""
    inputs = {name: value if value.ndim > 1 else value[None] for name, value in (sample.extra or {}).items()}
    ids = sample.ids[None]
    return final_hidden_states(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs})[0]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_rows_with_and_without_images_come_out_as_alone(family: str) -> None:
    model = tiny_vision_model(family, dtype=torch.float64)
    find_head(model)
    packer = choose_packer(model)
    assert packer.path == "packed"  # rows of text need no padding
    text = [Sample(ids, torch.ones(len(ids), dtype=torch.float64)) for ids in random_rows([9, 4], vocab=100)]
    images = [image_row(family, 0), image_row(family, 2)]
    for samples in (text, images, [images[0], text[0], images[1]]):
        micro = packer.collate(samples, "cpu")
        assert (micro.num_cells == micro.num_tokens) == (samples is text or family not in QWEN)
        with torch.no_grad(), packer.running(model, micro):
            found = final_hidden_states(model, micro.inputs).flatten(0, 1)[micro.predict_from]
        with torch.no_grad():
            wanted = torch.cat([alone(model, s)[:-1][s.weights[1:] != 0] for s in samples])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_adapters_only_in_the_language_model(family: str) -> None:
    model = tiny_vision_model(family)
    decoder = model.get_decoder()
    peft_model = attach_lora(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), seed=0, scope="language_model"
    )
    inside = {id(p) for p in decoder.parameters()}
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2  # two matrices, two layers, two projections
    assert {id(p) for p in trained} <= inside


def test_a_wrong_scope_lists_candidates() -> None:
    with pytest.raises(ModelError, match=r"no part called 'lm'; candidates are .*text_model.*vision_model"):
        attach_lora(tiny_vision_model("smolvlm"), LoraConfig(target_modules=["q_proj"]), seed=0, scope="lm")


def test_a_vision_language_folder_loads_whole(tmp_path) -> None:
    model = tiny_vision_model("llava")
    model.save_pretrained(tmp_path / "vl")
    loaded = load_base_model(str(tmp_path / "vl"))
    assert type(loaded) is type(model)
    assert build_skeleton(tmp_path / "vl", None) is None  # sharding loads it whole, too
    for (name, mine), theirs in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_images_of_several_sizes_need_a_mask() -> None:
    small, large = torch.ones(1, 3, 4, 4), torch.ones(1, 3, 4, 8)
    with pytest.raises(DataError, match="not told which part is real"):
        stack_inputs("pixel_values", [small, large])
    assert stack_inputs("pixel_values", [small, large], is_told=True)[0].sum() == small.sum()
