"""Supervised fine-tuning of the language model inside vision-language models, on text and on images."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from PIL import Image

from agilerl.algorithms import SFT
from agilerl.data.collate import inputs_of
from agilerl.errors import DataError, UnsupportedError
from agilerl.llm_envs import DatasetEnv
from agilerl.training.llm import train_llm_dataset
from tests.helpers import VISION_FAMILIES, random_rows, tiny_tokenizer, tiny_vision_model
from tests.vision import IMAGE_ID, TEMPLATE, idefics_processor, llava_processor, picture, tokenizer_with_images

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


class QwenProcessor:
    """What Qwen2-VL's processor does with images: patches, their grid and token types."""

    image_token = "<image>"
    image_processor = None

    def __init__(self) -> None:
        self.tokenizer = tokenizer_with_images()

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        values = torch.tensor(list(images[0].resize((16, 16)).tobytes()), dtype=torch.float32).view(16, 48) / 255
        ids = torch.full((1, 4), IMAGE_ID)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.ones_like(ids),
            "pixel_values": torch.cat([values, values], dim=1),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }


def agent_of(model: Any, **settings: Any) -> SFT:
    given = {"lora_config": LORA, "lora_target_scope": "language_model", "lr": 1e-2, "max_grad_norm": None} | settings
    return SFT(pad_token_id=0, pad_token="<pad>", actor_network=model, **given)


def reference(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of float64 cross-entropy, each row alone through the model's own forward pass."""
    total = torch.zeros((), dtype=torch.float64)
    weight = 0
    inputs = batch.get("inputs") or [None] * len(batch["input_ids"])
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        own = ids[mask.bool()]
        more = {name: value if value.ndim > 1 else value[None] for name, value in (inputs[row] or {}).items()}
        logits = model(input_ids=own[None], attention_mask=torch.ones_like(own)[None], **more).logits[0].double()
        targets = own.clone()
        targets[: batch["prompt_lengths"][row]] = -100
        total = total + torch.nn.functional.cross_entropy(logits[:-1], targets[1:], reduction="sum")
        weight += int((targets[1:] != -100).sum())
    loss = total / weight
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()))
    return loss.detach(), dict(zip(trained, grads, strict=True))


def check_learn(agent: SFT, batch: dict[str, Any]) -> None:
    frozen = {name: p.detach().clone() for name, p in agent.actor.named_parameters() if not p.requires_grad}
    loss, grads = reference(agent.actor, batch)
    found = agent.learn(batch)
    assert found["loss"] == pytest.approx(float(loss), abs=1e-9)
    for name, p in agent.actor.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-7, atol=1e-10, msg=name)
        else:
            assert torch.equal(p, frozen[name]), name


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_rows_of_text_train_exactly(family: str) -> None:
    model = tiny_vision_model(family, dtype=torch.float64)
    agent = agent_of(model, batch_size=3, micro_batch_size_per_gpu=2)
    rows = random_rows([9, 5, 7], vocab=100)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    check_learn(agent, {"input_ids": ids, "attention_mask": mask, "prompt_lengths": [3, 2, 1]})
    assert agent.learn({"input_ids": ids, "attention_mask": mask, "prompt_lengths": [3, 2, 1]})["padding_share"] == 0.0


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_rows_with_images_train_exactly_and_leave_the_vision_tower(family: str) -> None:
    processor = llava_processor() if family == "llava" else QwenProcessor()
    processor.chat_template = TEMPLATE
    rows = [
        {"prompt": "What?", "response": "red", "images": [picture("red")]},
        {"prompt": "Say so", "response": "no picture", "images": None},
        {"prompt": "<image> or <image>", "response": "b", "images": [picture("blue"), picture("green")]},
    ]
    env = DatasetEnv(rows, rows, processor.tokenizer, objective="sft", processor=processor, data_batch_size_per_gpu=3)
    batch = env.reset()
    order = [batch["response"].index(response) for response in ("red", "no picture", "b")]
    ids, inputs = batch["input_ids"], inputs_of(batch)
    assert [int((ids[row] == IMAGE_ID).sum()) for row in order] == [4, 0, 8]
    assert inputs[order[1]] is None
    assert processor.tokenizer.decode(ids[order[1]]).startswith("<|im_start|>user\nSay so<|im_end|>")
    for row, size in zip((order[0], order[2]), (1, 2), strict=True):
        assert inputs[row]["pixel_values"].shape[0] == size * (1 if family == "llava" else 16)
        assert batch["prompt_lengths"][row] > int((ids[row] == IMAGE_ID).nonzero().max())
    text = processor.tokenizer.decode(ids[order[2]])
    assert text.index("<image>") < text.index("or") < text.rindex("<image>")
    agent = agent_of(tiny_vision_model(family, dtype=torch.float64), batch_size=3)
    check_learn(agent, copy.deepcopy(batch))


def test_images_that_become_several_tiles_train_exactly() -> None:
    processor = idefics_processor()
    rows = [
        {"prompt": "What?", "response": "a", "images": [picture("red")]},
        {"prompt": "And?", "response": "b", "images": [picture("blue"), Image.new("RGB", (32, 32), "green")]},
    ]
    env = DatasetEnv(rows, rows, processor.tokenizer, objective="sft", processor=processor, data_batch_size_per_gpu=2)
    batch = env.reset()
    first = batch["response"].index("a")
    assert inputs_of(batch)[first]["pixel_values"].shape == (1, 3, 3, 16, 16)  # two tiles and the whole image
    assert inputs_of(batch)[1 - first]["pixel_values"].shape == (2, 5, 3, 16, 16)
    check_learn(agent_of(tiny_vision_model("idefics3", dtype=torch.float64), batch_size=2), copy.deepcopy(batch))


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def env_of(rows: list[dict[str, Any]], **settings: Any) -> DatasetEnv:
    processor = llava_processor()
    return DatasetEnv(rows, rows, processor.tokenizer, objective="sft", processor=processor, **settings)


def test_parts_columns_and_files_are_the_same_row(tmp_path) -> None:
    path = tmp_path / "red.png"
    picture("red").save(path)
    text = {"type": "text", "text": "What?"}
    rows = [
        {"prompt": chat({"type": "image", "image": picture("red")}, text), "response": "x"},
        {"prompt": chat({"type": "image"}, text), "response": "x", "images": [str(path)]},
        {"prompt": chat(text), "response": "x", "image": {"bytes": path.read_bytes(), "path": None}},
    ]
    batches = [env_of([row]).reset() for row in rows]
    for batch in batches[1:]:
        assert torch.equal(batch["input_ids"], batches[0]["input_ids"])
        assert torch.equal(batch["inputs"][0]["pixel_values"], batches[0]["inputs"][0]["pixel_values"])


def test_other_pictures_are_other_data() -> None:
    red, blue = (env_of([{"prompt": "a", "response": "b", "image": picture(color)}]) for color in ("red", "blue"))
    assert red.fingerprint != blue.fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": chat({"type": "image"}), "response": "x"}, "an image part without an image"),
        ({"prompt": "a", "response": "x", "images": ["nowhere.png"]}, "cannot be opened"),
        ({"prompt": "a", "response": "x", "images": ["https://example.org/a.png"]}, "given by address"),
    ],
)
def test_bad_images_are_told_by_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        env_of([row])


def test_images_are_never_cut() -> None:
    answer = {"prompt": chat({"type": "text", "text": "b"}), "response": "x"}
    answer["response"] = [
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": [{"type": "image", "image": picture("red")}]},
        {"role": "assistant", "content": "z"},
    ]
    with pytest.raises(DataError, match="images up to token"):
        env_of([answer], max_context_length=25)


def test_image_parts_without_a_processor_are_refused() -> None:
    rows = [{"prompt": chat({"type": "image", "image": picture("red")}), "response": "x"}]
    with pytest.raises(DataError, match="give DatasetEnv"):
        DatasetEnv(rows, rows, tokenizer_with_images(), objective="sft")


def test_the_tokenizer_must_be_the_processors() -> None:
    rows = [{"prompt": "a", "response": "x"}]
    with pytest.raises(DataError, match=r"use processor\.tokenizer"):
        DatasetEnv(rows, rows, tiny_tokenizer(), objective="sft", processor=llava_processor())
    with pytest.raises(DataError, match="takes no images"):
        DatasetEnv(rows, rows, tiny_tokenizer(), objective="sft", processor=tiny_tokenizer())


@pytest.mark.parametrize("image", [{"images": [picture("red")]}, {"image": picture("red")}, {}])
def test_pairs_with_images_are_refused_without_a_processor_too(image: dict[str, Any]) -> None:
    asked: Any = "a" if image else chat({"type": "image", "image": picture("red")})
    rows = [{"prompt": asked, "chosen": "b", "rejected": "c", **image}]
    with pytest.raises(UnsupportedError, match="pairs with images cannot be trained"):
        DatasetEnv(rows, rows, tokenizer_with_images(), objective="preference")
    text = [{"prompt": "a", "chosen": "b", "rejected": "c", "images": []}]
    DatasetEnv(text, text, tokenizer_with_images(), objective="preference")


def test_streams_with_images_are_refused() -> None:
    rows = [{"prompt": "a", "response": "b", "image": "red.png"}]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    processor = llava_processor()
    with pytest.raises(UnsupportedError, match="cannot be streamed"):
        DatasetEnv(stream, rows, processor.tokenizer, objective="sft", processor=processor)


def test_pairs_with_images_are_refused() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    processor = llava_processor()
    with pytest.raises(UnsupportedError, match="objective='sft' only"):
        DatasetEnv(rows, rows, processor.tokenizer, objective="preference", processor=processor)


def test_a_folder_is_trained_saved_and_loaded(tmp_path) -> None:
    tiny_vision_model("idefics3").save_pretrained(tmp_path / "base")
    rows = random_rows([9, 5], vocab=100)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    batch: Any = {"input_ids": ids, "attention_mask": (ids > 0).long(), "prompt_lengths": [3, 2]}
    agent = agent_of(None, model_name=str(tmp_path / "base"), batch_size=2)
    agent.learn(batch)
    agent.save_checkpoint(str(tmp_path / "saved"))
    loaded = SFT.load(str(tmp_path / "saved"))
    assert type(loaded.actor.get_base_model()) is type(agent.actor.get_base_model())
    assert loaded.learn(batch, training=False)["loss"] == agent.learn(batch, training=False)["loss"]


def test_the_training_loop_feeds_images() -> None:
    colors = ["red", "blue", "green", "white"]
    env = env_of([{"prompt": "What?", "response": color, "image": picture(color)} for color in colors])
    agent = agent_of(tiny_vision_model("llava", spread=None), batch_size=2)
    before = float(agent.test(env, None))
    train_llm_dataset([agent], env, max_steps=16, evaluation_interval=None, verbose=False, checkpoints=False)
    assert float(agent.test(env, None)) > before
