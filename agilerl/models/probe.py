"""Which of the three paths a model takes, decided by checks on the model itself and not by a list of names.

No single flag of transformers tells whether samples stay apart in a packed row: some models never call the registered
attention function, some mix neighbours in convolutions or recurrences, some hand over bounds that the function does
not know. So the model is asked: two short samples are run alone, then together, then together with another first
sample. The second sample must come out the same each time.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from agilerl.errors import ConfigError, ModelError
from agilerl.models.attention import Segments
from agilerl.models.head import final_hidden_states, find_head
from agilerl.models.microbatch import Sample
from agilerl.models.modules import probing
from agilerl.models.packing import Packer, PackingPath, text_model

__all__ = ["choose_packer", "default_token_budget"]

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (7, 5)
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Largest relative difference that rounding explains, by dtype. A leak between samples is of the order of one.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def default_token_budget(model: nn.Module, *, on_gpu: bool | None = None) -> int:
    """Cells of a micro-batch that keep the activations of a training step small: a function of the model alone.

    Free memory is never looked at, so that the same run is planned the same way everywhere. Larger micro-batches than
    this gain next to nothing in speed: the matrix products are wide enough.
    """
    config = text_model(model).config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 1024))
    layers = int(getattr(config, "num_hidden_layers", 24))
    on_gpu = next(model.parameters()).device.type == "cuda" if on_gpu is None else on_gpu
    # About 16 stored values per token, layer and hidden unit, in bytes of the common 2-4 byte dtypes.
    per_token = 16 * 3 * hidden * max(layers, 1)
    budget = (8 if on_gpu else 1) * 2**30 // per_token
    return max(512, min(65_536 if on_gpu else 8_192, 2 ** max(budget, 1).bit_length() // 2))


def _same(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype, 1e-3)
    exact = expected.double()
    difference = (found.double() - exact).norm() / exact.norm().clamp_min(1e-12)
    return bool(torch.isfinite(difference)) and float(difference) <= tolerance


def _keeps_apart(model: Any, packer: Packer, num_layers: int) -> str | None:
    """Run the probe on one path; return what is wrong with it, or None."""
    device = next(model.parameters()).device
    vocabulary = int(getattr(text_model(model).config.get_text_config(), "vocab_size", 8))
    generator = torch.Generator().manual_seed(0)
    lengths = (*_PROBE_LENGTHS, _PROBE_LENGTHS[0])
    ids = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    first, second, other = (Sample(row, torch.ones(len(row))) for row in ids)

    def run(how: Packer, *samples: Sample) -> list[Tensor]:
        micro = how.collate(samples, device)
        with how.running(model, micro) as segments:
            hidden = final_hidden_states(model, micro.inputs)
        if isinstance(segments, Segments) and segments.calls != num_layers:
            raise ModelError(f"{segments.calls} of {num_layers} layers use the attention interface")
        if how.path == "padded":
            return [row[: len(sample.ids)] for row, sample in zip(hidden, samples, strict=True)]
        return list(hidden[0].split([len(sample.ids) for sample in samples]))

    # A model that takes more than text has positions of its own, which those handed over must reproduce.
    alone = replace(packer, path="padded", with_positions=packer.with_positions and not _takes_more_than_text(model))
    together, swapped = run(packer, first, second), run(packer, other, second)
    for found, sample in zip(together, (first, second), strict=True):
        if not _same(found, run(alone, sample)[0]):
            return "samples do not come out as when they are alone"
    if not _same(swapped[1], together[1]):
        return "a sample is changed by its neighbour"
    return None


def _try(model: Any, packer: Packer, num_layers: int = 0) -> str | None:
    try:
        return _keeps_apart(model, packer, num_layers)
    except ModelError as error:
        return str(error)
    except Exception as error:
        # Models answer an unexpected call in many ways; whatever it is, it is a reason against this path.
        words = " ".join(str(error).split())[:120]
        return f"the model refuses it ({type(error).__name__}: {words})"


def _takes_positions(model: Any) -> bool:
    inner = text_model(model)
    return "position_ids" in inspect.signature(getattr(inner, "base_model", inner).forward).parameters


def _takes_more_than_text(model: Any) -> bool:
    config = text_model(model).config
    return config.get_text_config() is not config


def _obstacle(model: Any, positions_from_mask: bool) -> str | None:
    """What forbids any path that relies on restarting positions, before anything is run."""
    inner = text_model(model)
    if not positions_from_mask:
        return "positions are not taken from the attention mask (calc_position_embeddings=False)"
    if not _takes_positions(model):
        return "the model takes no position_ids"
    if getattr(inner, "_is_stateful", False):
        return "the model is recurrent"
    return None


def _probe(model: Any, base: Packer, obstacle: str | None) -> Packer:
    config = text_model(model).config.get_text_config()
    if obstacle is None:
        layers = int(getattr(config, "num_hidden_layers", 0))
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
        against = f"it has layers of type {', '.join(unknown)}" if unknown else None
        against = against or _try(model, replace(base, path="packed"), layers)
        if against is None:
            return replace(base, path="packed", reason="each sample attends to itself only; no padding is computed")
        native = _try(model, replace(base, path="native"))
        if native is None:
            reason = f"the model's own attention keeps samples apart; attention per sample is ruled out: {against}"
            return replace(base, path="native", reason=reason)
        obstacle = f"no path without padding is exact: {against}; with its own attention: {native}"
    return _padded(model, replace(base, path="padded", reason=obstacle))


def _padded(model: Any, base: Packer) -> Packer:
    """Leave padding unmasked where real tokens do not see it: attention is faster, and no row is all masked."""
    if _takes_more_than_text(model) and base.with_positions and _try(model, replace(base, path="padded")) is not None:
        base = replace(base, with_positions=False)  # positions that do not simply count tokens are left to the model
    unmasked = replace(base, path="padded", masks_padding=False)
    return unmasked if _try(model, unmasked) is None else replace(base, path="padded")


def choose_packer(model: Any, *, positions_from_mask: bool = True, prefer: str | None = None) -> Packer:
    """Find the fastest path that computes exactly what the model computes on each row alone.

    Args:
        model: A causal language model, with or without adapters, with its weights loaded.
        positions_from_mask: False keeps the model's own column positions, and so the padded path.
        prefer: Take this path without asking the model (for tests and benchmarks).

    Returns:
        A packer whose ``path`` and ``reason`` say what was chosen and why.
    """
    if prefer is not None and prefer not in get_args(PackingPath):
        raise ConfigError(f"The path {prefer!r} is unknown; choose from {', '.join(get_args(PackingPath))}.")
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    base = Packer(
        path="padded",
        reason="asked for",
        token_budget=default_token_budget(model),
        weight_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        with_positions=positions_from_mask and _takes_positions(model),
    )
    if any(parameter.is_meta for parameter in model.parameters()):
        return replace(base, reason="the weights are not loaded yet, so the model cannot be probed")
    find_head(model)  # settles how the model's hidden states are reached
    with probing(model):
        if prefer == "padded":
            packer = _padded(model, base)
        elif prefer is not None:
            packer = replace(base, path=cast(PackingPath, prefer))
        else:
            packer = _probe(model, base, _obstacle(model, positions_from_mask))
    logger.info("Micro-batches take the %s path: %s.", packer.path, packer.reason)
    return packer
