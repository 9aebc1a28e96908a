"""Tiny models, tokenizers and rows, made in memory: deterministic, offline, real classes at toy size."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

__all__ = [
    "CHATML",
    "FAMILIES",
    "TINY_VOCAB",
    "VISION_FAMILIES",
    "random_rows",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "tiny_vision_model",
]

TINY_VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IDS: dict[str, Any] = {"vocab_size": TINY_VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT: dict[str, Any] = _IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_SLIDE_FULL = ["sliding_attention", "full_attention"]
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": 6},
    "qwen2": _COMMON,
    "qwen2_sliding": _COMMON | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": _COMMON | {"head_dim": 8},
    "gemma": _COMMON | {"head_dim": 8},
    "gemma2": _COMMON
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": _COMMON
    | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": _SLIDE_FULL},
    "phi": _COMMON,
    "phi3": _COMMON | {"sliding_window": 6},
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "codegen": _GPT | {"rotary_dim": 4},
    "gpt_neo": _IDS
    | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
        "max_position_embeddings": 128,
    },
    "gpt_neox": _COMMON,
    "gpt_bigcode": _GPT,
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "olmo3": _COMMON | {"sliding_window": 6, "layer_types": _SLIDE_FULL},
    "cohere": _COMMON | {"logit_scale": 0.25},
    "cohere2": _COMMON | {"logit_scale": 0.25, "sliding_window": 6, "layer_types": _SLIDE_FULL},
    "granite": _COMMON
    | {"logits_scaling": 2.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "stablelm": _COMMON,
    "starcoder2": _COMMON | {"sliding_window": 6},
    "falcon": _COMMON | {"alibi": False, "multi_query": True, "new_decoder_architecture": False},
    "falcon_alibi": _COMMON | {"alibi": True, "multi_query": True, "new_decoder_architecture": False},
    "opt": _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "smollm3": _COMMON,
    "nemotron": _COMMON,
    "glm4": _COMMON | {"head_dim": 8},
    "biogpt": _COMMON,
    "xglm": _IDS
    | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128},
    "bloom": _COMMON | {"n_layer": 2, "n_head": 4},
    "mpt": _IDS | {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "mixtral": _COMMON | {"num_local_experts": 4},
    "qwen2_moe": _COMMON | _MOE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _COMMON | _MOE | {"head_dim": 8, "moe_intermediate_size": 16},
    "olmoe": _COMMON | _MOE,
    "gpt_oss": _COMMON
    | {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": _SLIDE_FULL,
    },
    "deepseek_v3": _COMMON
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "llama4_text": _COMMON
    | {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48},
    "mamba": _COMMON | {"state_size": 4},
    "mamba2": _COMMON | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "rwkv": _COMMON | {"attention_hidden_size": 32},
    "qwen3_next": _COMMON
    | _MOE
    | {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": _COMMON | {"layer_types": ["conv", "full_attention"]},
    "jamba": _COMMON
    | {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    },
    "recurrent_gemma": _COMMON
    | {"head_dim": 8, "lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
    "falcon_h1": _COMMON
    | {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "head_dim": 8,
        "lm_head_multiplier": 0.5,
    },
    "modernbert-decoder": _COMMON | {"local_attention": 6, "global_attn_every_n_layers": 2},
}
"""Settings of each tiny family; a key may be a variant such as ``falcon_alibi`` of the model type ``falcon``."""

_VARIANTS = {"falcon_alibi": "falcon", "qwen2_sliding": "qwen2"}


def tiny_config(family: str, **overrides: Any) -> Any:
    """Configuration of a tiny model; every dropout that the family has is 0 unless overridden."""
    config = AutoConfig.for_model(_VARIANTS.get(family, family), **{**FAMILIES[family], **overrides})
    for name in config.to_dict():
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and name not in overrides:
            setattr(config, name, 0.0)
    return config


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float | None = 0.3,
    attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A tiny causal LM with random weights, in eval mode; the global generator is left as it was.

    Args:
        family: Key of ``FAMILIES``.
        seed: Seed of the weights.
        dtype: Type of all floating parameters and buffers.
        spread: Standard deviation of every matrix, large enough that attention and softcaps matter; None keeps the
            family's own initialisation.
        attention: ``attn_implementation``; None takes the family's default.
        overrides: Fields of the configuration.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kwargs = {} if attention is None else {"attn_implementation": attention}
        model = AutoModelForCausalLM.from_config(config, **kwargs)
        if spread is not None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim >= 2 and "A_log" not in name:
                        parameter.normal_(0.0, spread)
    model = model.to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product of transformers has no float64
    return model.eval()


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(
    *,
    chat_template: str | None = None,
    add_bos: bool = False,
    pad_token: str | None = "<pad>",
    eos_token: str | None = "</s>",
    bos_token: str | None = "<s>",
    all_bytes: bool = False,
    merges: tuple[tuple[str, str], ...] = (),
    **kwargs: Any,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without (or with a few given) merges: one token per character of ASCII text.

    Ids: 0 ``<pad>``, 1 ``<s>``, 2 ``</s>``, 3 ``<unk>``, 4 ``<|im_start|>``, 5 ``<|im_end|>``, then the alphabet. The
    ASCII alphabet fits the vocabulary of 128 of the tiny models; other characters are ``<unk>`` there.

    Args:
        chat_template: A Jinja template, ``"chatml"`` for a plain ChatML one, or None.
        add_bos: Put ``<s>`` before every text that is encoded with special tokens.
        pad_token: None for a tokenizer without padding, ``"</s>"`` for the common pad = eos.
        eos_token: None for a tokenizer without end of sequence.
        bos_token: None for a tokenizer without beginning of sequence.
        all_bytes: Take all 256 bytes (262 ids) instead of ASCII only.
        merges: Pairs of strings that are merged, in order of priority.
        kwargs: Passed to ``PreTrainedTokenizerFast``.
    """
    specials = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not all_bytes:
        alphabet = [symbol for symbol in alphabet if "!" <= symbol <= "~" or symbol in "ĠĊĉč"]
    tokens = specials + alphabet + ["".join(pair) for pair in merges]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, list(merges), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token=pad_token,
        eos_token=eos_token,
        bos_token=bos_token,
        **kwargs,
    )
    if chat_template is not None:
        tokenizer.chat_template = CHATML if chat_template == "chatml" else chat_template
    return tokenizer


def random_rows(lengths: list[int], *, seed: int = 0, vocab: int = TINY_VOCAB) -> list[torch.Tensor]:
    """Rows of random ids (3 and up: no special ones), one per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, vocab, (length,), generator=generator) for length in lengths]


VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "smolvlm", "idefics3", "llava")
"""Vision-language models of `tiny_vision_model`."""

_IMAGE_ID = 120
_QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def tiny_vision_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float | None = 0.3
) -> PreTrainedModel:
    """A tiny vision-language model with random weights, in eval mode. Token 120 stands for an image.

    Args:
        family: One of `VISION_FAMILIES`.
        seed: Seed of the weights.
        dtype: Type of all floating parameters and buffers.
        spread: Standard deviation of every matrix; None keeps the family's own initialisation.
    """
    if family.startswith("qwen2"):
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
        own = (
            {"embed_dim": 32, "mlp_ratio": 2}
            if family == "qwen2_vl"
            else {"intermediate_size": 48, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [0]}
        )
        config = AutoConfig.for_model(
            family,
            text_config=_COMMON | {"rope_parameters": rope},
            vision_config=_QWEN_VISION | own,
            image_token_id=_IMAGE_ID,
            video_token_id=121,
            vision_start_token_id=122,
            vision_end_token_id=123,
        )
    elif family == "llava":
        config = AutoConfig.for_model(
            family,
            vision_config=_TOWER | {"model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32},
            text_config=_COMMON | {"model_type": "llama"},
            image_token_index=_IMAGE_ID,
            image_token_id=_IMAGE_ID,
            image_seq_length=4,
        )
    else:
        config = AutoConfig.for_model(
            family,
            vision_config=_TOWER,
            text_config=_COMMON | {"model_type": "llama"},
            image_token_id=_IMAGE_ID,
            scale_factor=2,
            pad_token_id=0,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters() if spread is not None else ():
            if parameter.ndim >= 2:
                parameter.data.normal_(0.0, spread)
    return model.to(dtype).eval()
