"""Which of the three paths a model takes, decided by checks on the model itself and not by a list of names.

No single flag of transformers tells whether samples stay apart in a packed row: some models never call the registered
attention function, some mix neighbours in convolutions or recurrences, some hand over bounds that the function does
not know. So the model is asked: two short samples are run alone, then together, then together with another first
sample. The second sample must come out the same each time.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from agilerl.errors import ConfigError
from agilerl.models.attention import attend
from agilerl.models.microbatch import Sample
from agilerl.models.packing import Packer, PackingPath, attention_configs, text_model

__all__ = ["choose_packer", "default_token_budget"]

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (7, 5)
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Largest relative difference that rounding explains, by dtype. A leak between samples is of the order of one.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def default_token_budget(model: nn.Module) -> int:
    """Cells of a micro-batch that keep the activations of a training step small: a function of the model alone.

    Free memory is never looked at, so that the same run is planned the same way everywhere. Larger micro-batches than
    this gain next to nothing in speed: the matrix products are wide enough.
    """
    config = text_model(model).config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 1024))
    layers = int(getattr(config, "num_hidden_layers", 24))
    on_gpu = next(model.parameters()).device.type == "cuda"
    # About 16 stored values per token, layer and hidden unit, in bytes of the common 2-4 byte dtypes.
    per_token = 16 * 3 * hidden * max(layers, 1)
    budget = (8 if on_gpu else 1) * 2**30 // per_token
    return max(512, min(65_536 if on_gpu else 8_192, 2 ** max(budget, 1).bit_length() // 2))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _backbone(model: nn.Module) -> nn.Module:
    inner = text_model(model)
    return getattr(inner, "base_model", inner)


def _hidden(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return _backbone(model)(**inputs, use_cache=False)[0]


def _same(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype, 1e-3)
    exact = expected.double()
    difference = (found.double() - exact).norm() / exact.norm().clamp_min(1e-12)
    return bool(torch.isfinite(difference)) and float(difference) <= tolerance


def _keeps_apart(model: nn.Module, packer: Packer, num_layers: int) -> str | None:
    """Run the probe on one path; return what is wrong with it, or None."""
    device = next(model.parameters()).device
    vocabulary = int(getattr(text_model(model).config.get_text_config(), "vocab_size", 8))
    generator = torch.Generator().manual_seed(0)
    lengths = (*_PROBE_LENGTHS, _PROBE_LENGTHS[0])
    ids = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    first, second, other = (Sample(row, torch.ones(len(row))) for row in ids)
    alone = Packer(path="padded", reason="", token_budget=1, with_positions=packer.with_positions)
    expected = [_hidden(model, alone.collate([sample], device).inputs)[0] for sample in (first, second)]
    together = packer.collate([first, second], device)
    swapped = packer.collate([other, second], device)
    if packer.path == "packed":
        configs = attention_configs(model)
        with attend(configs, together.lengths) as segments:
            found = _hidden(model, together.inputs)[0]
        if segments.calls != num_layers:
            return f"{segments.calls} of {num_layers} layers use the attention interface"
    else:
        found = _hidden(model, together.inputs)[0]
    with packer.running(model, swapped):
        moved = _hidden(model, swapped.inputs)[0]
    size = _PROBE_LENGTHS[0]
    if not (_same(found[:size], expected[0]) and _same(found[size:], expected[1])):
        return "samples in one row do not come out as when they are alone"
    if not _same(moved[size:], found[size:]):
        return "a sample is changed by its neighbour in the row"
    return None


def _try(model: nn.Module, packer: Packer, num_layers: int) -> str | None:
    try:
        return _keeps_apart(model, packer, num_layers)
    except Exception as error:
        # Models answer an unexpected call in many ways; whatever it is, it is a reason against this path.
        return (
            f"the model refuses it ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"
        )


def _obstacle(model: nn.Module, positions_from_mask: bool) -> str | None:
    """What forbids any path that relies on restarting positions, before anything is run."""
    inner = text_model(model)
    if not positions_from_mask:
        return "positions are not taken from the attention mask (calc_position_embeddings=False)"
    if inner.config.get_text_config() is not inner.config:
        return "the model takes more than text and derives positions by itself"
    if "position_ids" not in inspect.signature(_backbone(model).forward).parameters:
        return "the model takes no position_ids"
    if getattr(inner, "_is_stateful", False):
        return "the model is recurrent"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "the weights are not loaded yet, so the model cannot be probed"
    return None


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
    inner = text_model(model)
    config = inner.config.get_text_config()
    takes_positions = "position_ids" in inspect.signature(_backbone(model).forward).parameters
    with_positions = positions_from_mask and takes_positions and config is inner.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def make(path: PackingPath, reason: str) -> Packer:
        return Packer(
            path=path,
            reason=reason,
            token_budget=default_token_budget(model),
            weight_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            with_positions=with_positions,
        )

    if prefer is not None:
        path: PackingPath = prefer  # type: ignore[assignment]
        return make(path, "asked for")
    packer = _probe(model, make, _obstacle(model, positions_from_mask))
    logger.info("Micro-batches take the %s path: %s.", packer.path, packer.reason)
    return packer


def _probe(model: nn.Module, make: Any, obstacle: str | None) -> Packer:
    if obstacle is not None:
        return make("padded", obstacle)
    config = text_model(model).config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0))
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    with _evaluating(model):
        against = f"it has layers of type {', '.join(unknown)}" if unknown else None
        against = against or _try(model, make("packed", ""), layers)
        if against is None:
            return make("packed", "each sample attends to itself only; no padding is computed")
        native = _try(model, make("native", ""), layers)
    if native is None:
        return make("native", f"its own attention keeps samples apart; attention per sample is not possible: {against}")
    return make("padded", f"no padding-free path is exact: {against}; own attention: {native}")
