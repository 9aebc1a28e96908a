"""Examples to padded tensors for people and ``learn``, and back to unpadded samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agilerl.data.records import Example, PreferenceExample
from agilerl.errors import DataError
from agilerl.typing import PreferencePrompts, SFTPrompts

__all__ = ["collate_preference", "collate_sft", "inputs_of", "preference_samples_of", "samples_of"]


def _pad(examples: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    length = max((len(example.ids) for example in examples), default=0)
    ids = torch.full((len(examples), length), pad_id, dtype=torch.long)
    mask = torch.zeros((len(examples), length), dtype=torch.long)
    weights = torch.zeros((len(examples), length), dtype=torch.float32)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.from_numpy(example.ids.astype("int64"))
        mask[row, :size] = 1
        for start, end, weight in example.spans:
            weights[row, start:end] = weight
    return ids, mask, weights


def collate_sft(examples: Sequence[Example], pad_id: int, *, with_weights: bool) -> SFTPrompts:
    """Pad on the right: ids, mask [B, L], and weights [B, L] where ``prompt_lengths`` cannot say what is trained."""
    ids, mask, weights = _pad(examples, pad_id)
    batch: SFTPrompts = {
        "prompt": [example.prompt for example in examples],
        "response": [example.response for example in examples],
        "prompt_lengths": [example.prompt_length for example in examples],
        "input_ids": ids,
        "attention_mask": mask,
    }
    if with_weights:
        batch["response_weights"] = weights
    return batch


def collate_preference(examples: Sequence[PreferenceExample], pad_id: int, *, with_weights: bool) -> PreferencePrompts:
    """Pad each side on the right: ids, mask and (where needed) weights [B, L_side]."""
    chosen = _pad([example.chosen for example in examples], pad_id)
    rejected = _pad([example.rejected for example in examples], pad_id)
    batch: PreferencePrompts = {
        "prompt": [example.chosen.prompt for example in examples],
        "chosen": [example.chosen.response for example in examples],
        "rejected": [example.rejected.response for example in examples],
        "prompt_lengths": [example.chosen.prompt_length for example in examples],
        "chosen_input_ids": chosen[0],
        "chosen_attention_mask": chosen[1],
        "rejected_input_ids": rejected[0],
        "rejected_attention_mask": rejected[1],
    }
    if with_weights:
        batch["chosen_weights"], batch["rejected_weights"] = chosen[2], rejected[2]
    return batch


def samples_of(batch: SFTPrompts) -> list[tuple[Tensor, Tensor]]:
    """Unpadded rows of a batch: ids (Long [l]) and the weight of each token as a target (Float [l], first token 0).

    Works for padding on either side. Weights come from ``response_weights`` where present, else from ``prompt_lengths``.

    Raises:
        DataError: A key is missing or shapes do not agree.
    """
    return _samples(batch, "input_ids", "attention_mask", "response_weights")


def inputs_of(batch: SFTPrompts) -> list[dict[str, Tensor] | None]:
    """Further model inputs of each row of a batch (``inputs``); None for rows without.

    Raises:
        DataError: There is not one entry for each row.
    """
    rows = len(_matrix(batch, "input_ids"))
    inputs = batch.get("inputs")
    if inputs is None:
        return [None] * rows
    if len(inputs) != rows:
        raise DataError(
            f"'inputs' has {len(inputs)} entries for {rows} rows; give one per row, None for a row without."
        )
    return [each or None for each in inputs]


def preference_samples_of(
    batch: PreferencePrompts,
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Unpadded (chosen, rejected) rows of a batch, each as :func:`samples_of` gives them."""
    chosen, rejected = (
        _samples(batch, f"{side}_input_ids", f"{side}_attention_mask", f"{side}_weights")
        for side in ("chosen", "rejected")
    )
    if len(chosen) != len(rejected):
        raise DataError(
            f"The batch has {len(chosen)} chosen rows and {len(rejected)} rejected ones; they must pair up."
        )
    return chosen, rejected


def _samples(batch: Any, ids_key: str, mask_key: str, weights_key: str) -> list[tuple[Tensor, Tensor]]:
    ids, mask = _matrix(batch, ids_key), _matrix(batch, mask_key)
    if mask.shape != ids.shape:
        raise DataError(
            f"'{mask_key}' has shape {tuple(mask.shape)} but '{ids_key}' has {tuple(ids.shape)}; make them equal."
        )
    real = mask.bool()
    dtype = torch.float32
    if batch.get(weights_key) is not None:
        weights = _matrix(batch, weights_key)
        if weights.shape != ids.shape:
            raise DataError(
                f"'{weights_key}' has shape {tuple(weights.shape)} but '{ids_key}' has {tuple(ids.shape)}; make them equal."
            )
        dtype = weights.dtype if weights.is_floating_point() else dtype
        if not bool(torch.isfinite(weights[real]).all()):
            raise DataError(f"'{weights_key}' holds a NaN or infinite weight; weights must be finite.")
        rows = [(ids[row][real[row]], weights[row][real[row]].to(dtype)) for row in range(len(ids))]
    else:
        lengths = _prompt_lengths(batch, len(ids))
        rows = []
        for row, length in enumerate(lengths):
            tokens = ids[row][real[row]]
            rows.append((tokens, (torch.arange(len(tokens), device=tokens.device) >= length).to(dtype)))
    for _, weights in rows:
        weights[:1] = 0.0  # nothing predicts the first token
    return rows


def _matrix(batch: Any, key: str) -> Tensor:
    value = batch.get(key)
    if value is None:
        raise DataError(f"The batch has no '{key}'; it has {sorted(batch)}.")
    value = torch.as_tensor(value)
    if value.ndim != 2:
        raise DataError(f"'{key}' has shape {tuple(value.shape)}; it must be [rows, length].")
    return value


def _prompt_lengths(batch: Any, num_rows: int) -> list[int]:
    lengths = batch.get("prompt_lengths")
    if lengths is None:
        raise DataError(
            "The batch has neither 'prompt_lengths' nor 'response_weights', so it does not say what is trained."
        )
    lengths = [int(length) for length in lengths]
    if len(lengths) != num_rows:
        raise DataError(f"'prompt_lengths' has {len(lengths)} entries for {num_rows} rows; give one per row.")
    if any(length < 0 for length in lengths):
        raise DataError(f"'prompt_lengths' holds {min(lengths)}; lengths must be 0 or more.")
    return lengths
