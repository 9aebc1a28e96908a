"""Tiny processors of vision-language models, made in memory, and pictures for them."""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import CLIPImageProcessorPil, Idefics3Processor, LlavaProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.helpers import tiny_tokenizer

__all__ = ["IMAGE_ID", "TEMPLATE", "idefics_processor", "llava_processor", "picture", "tokenizer_with_images"]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE_ID = 120


def tokenizer_with_images() -> Any:
    """The tiny tokenizer with ``<image>`` as token 120."""
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    tokenizer.add_tokens([f"<unused{n}>" for n in range(IMAGE_ID - len(tokenizer))])
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_ID
    return tokenizer


def llava_processor() -> LlavaProcessor:
    """Four tokens for an image."""
    pixels = CLIPImageProcessorPil(size={"height": 16, "width": 16}, do_center_crop=False)
    return LlavaProcessor(
        pixels,
        tokenizer_with_images(),
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def idefics_processor() -> Idefics3Processor:
    """Images become several tiles and one of the whole."""
    tokenizer = tokenizer_with_images()
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_tokens(
        ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles], special_tokens=True
    )
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def picture(color: str) -> Image.Image:
    """A picture of one colour."""
    return Image.new("RGB", (10, 20), color)
