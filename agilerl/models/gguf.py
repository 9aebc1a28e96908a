"""A Llama-style GGUF file -> an ordinary model folder with unpacked weights.

transformers reads GGUF files too, but leaves the model marked as quantised (it cannot be trained or saved) and drops
the tokenizer's rule that digits stand alone; what the presets need is small enough to be done here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agilerl.errors import ModelError

__all__ = ["convert_gguf"]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the file's mark of a token that is no text


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in ``source`` to ``folder`` as float32, with tokenizer, chat template and generation config.

    Raises:
        ModelError: The file holds another architecture or tokenizer than the ones handled here.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields.get("general.architecture"), fields.get("tokenizer.ggml.model")) != ("llama", "gpt2"):
        raise ModelError(f"{source.name} is not a Llama model with a byte-level BPE tokenizer")
    tokenizer = _tokenizer(fields)
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    state = {_name(tensor.name): _values(tensor, config) for tensor in reader.tensors}
    _check(state, config)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        max_position_embeddings=of("context_length"),
        # The file stores float32: 9.999999747378752e-06 was written as 1e-5.
        rms_norm_eps=float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(of("rope.freq_base"))},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _check(state: dict[str, torch.Tensor], config: LlamaConfig) -> None:
    """Every weight of the model is there, once, in its shape; a tied head is not stored."""
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    found = {name: value.shape for name, value in state.items()}
    if found != wanted:
        wrong = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise ModelError(f"the file does not fit its own description: {', '.join(wrong[:5])}")


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, layer, part = stem.split(".")
    if block != "blk" or part not in _INNER:
        raise ModelError(f"the file has a tensor '{name}' that a Llama model does not have")
    return f"model.layers.{layer}.{_INNER[part]}.{kind}"


def _values(tensor: Any, config: LlamaConfig) -> torch.Tensor:
    values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(tensor.name.split(".")[-2])
    if heads is not None:
        # llama.cpp rotates neighbouring pairs of a head, transformers its two halves.
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.ascontiguousarray(values))


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    is_smollm = fields.get("tokenizer.ggml.pre") == "smollm"
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes]) if is_smollm else by_bytes
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])

    def token(role: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
