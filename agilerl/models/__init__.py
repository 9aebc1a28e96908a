"""A causal language model and its adapters: build, wrap, share, and run without padding."""

from agilerl.models.adapters import Adapters
from agilerl.models.build import load_base_model, load_tokenizer
from agilerl.models.embeddings import add_tokens, resize_embeddings, train_tokens
from agilerl.models.head import Head, final_hidden_states, find_head, unwrap
from agilerl.models.lora import adopt_adapter, attach_lora, config_differences, describe_adapters
from agilerl.models.merge import Merged, merge_adapter
from agilerl.models.quantization import build_bnb_quantization_config
from agilerl.models.share import share_base
from agilerl.models.targets import adapt_lora_config_for_model

__all__ = [
    "Adapters",
    "Head",
    "Merged",
    "adapt_lora_config_for_model",
    "add_tokens",
    "adopt_adapter",
    "attach_lora",
    "build_bnb_quantization_config",
    "config_differences",
    "describe_adapters",
    "final_hidden_states",
    "find_head",
    "load_base_model",
    "load_tokenizer",
    "merge_adapter",
    "resize_embeddings",
    "share_base",
    "train_tokens",
    "unwrap",
]
