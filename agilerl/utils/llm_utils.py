"""LoRA scope and quantisation helpers."""

from agilerl.models.lora import adapt_lora_config_for_model
from agilerl.models.quantization import build_bnb_quantization_config

__all__ = ["adapt_lora_config_for_model", "build_bnb_quantization_config"]
