"""New tokens: rows for them, training for those rows only, and the same rows again when an adapter is loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from agilerl.errors import ModelError
from agilerl.models import presets
from agilerl.models.hub import hub_arguments
from agilerl.models.tie import has_tied_head

__all__ = ["add_tokens", "check_token_rows", "embedding_rows", "resize_embeddings", "stored_rows", "train_tokens"]


def add_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], *, special: bool = False
) -> list[int]:
    """Teach a tokenizer new tokens and give the model rows for them.

    Returns:
        Ids of the tokens, for ``train_tokens``; tokens that existed keep theirs.
    """
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    if len(tokenizer) > embedding_rows(model):
        resize_embeddings(model, len(tokenizer))
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens))
    return [int(i) for i in ids]


def train_tokens(lora_config: LoraConfig, model: PreTrainedModel, ids: Sequence[int]) -> LoraConfig:
    """A copy of the configuration that also trains these rows of the embedding, and of the head where it has its own."""
    ends: list[Any] = [model.get_input_embeddings()]
    if not has_tied_head(model):
        ends.append(model.get_output_embeddings())
    paths = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    config = copy.deepcopy(lora_config)
    config.trainable_token_indices = {path.rpartition(".")[2]: sorted(set(ids)) for path in paths}
    check_token_rows(model, config)
    return config


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding: ids that the model can read."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def stored_rows(name: str) -> int | None:
    """Vocabulary of a stored model by its configuration; None where that does not tell."""
    try:
        where = {} if Path(name).is_dir() else hub_arguments()
        config: Any = AutoConfig.from_pretrained(_place(name), **where)
    except (OSError, ValueError):
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def _place(name: str) -> str:
    return str(presets.load_preset_folder(name)) if presets.is_preset(name) else name


def resize_embeddings(model: PreTrainedModel, rows: int) -> None:
    """Grow the embedding (and head) to ``rows``; every new row is the mean of the old ones, so that loads repeat it.

    Raises:
        ModelError: Fewer rows than there are.
    """
    old = embedding_rows(model)
    if rows < old:
        raise ModelError(f"The embedding has {old} rows; it cannot shrink to {rows}.")
    if rows == old:
        return
    was_tied = has_tied_head(model)
    with torch.random.fork_rng():  # transformers draws values for the new rows, which are replaced below
        model.resize_token_embeddings(rows, mean_resizing=False)
    ends: list[Any] = [model.get_input_embeddings(), *(() if was_tied else (model.get_output_embeddings(),))]
    with torch.no_grad():
        for end in ends:
            for parameter in end.parameters():
                parameter[old:] = parameter[:old].double().mean(dim=0).to(parameter.dtype)


def check_token_rows(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuse trainable rows that the embedding does not have.

    Raises:
        ModelError: Names the highest id and what to do.
    """
    indices = config.trainable_token_indices
    if not indices:
        return
    groups = indices.values() if isinstance(indices, dict) else [indices]
    highest, rows = max((i for group in groups for i in group), default=0), embedding_rows(model)
    if highest >= rows:
        raise ModelError(
            f"The adapter trains token {highest}, and the model has {rows} embedding rows only: grow them with "
            f"resize_embeddings(model, {highest + 1}) or model_config={{'embedding_rows': {highest + 1}}}."
        )
