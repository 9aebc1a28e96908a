"""Final hidden states and the head that turns them into logits, scale and softcap included.

The two are checked against the model's own logits before they are used: a map that was missed, or an adapter on the
head that was bypassed, would train on another loss than the model's without any error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from agilerl.errors import ModelError
from agilerl.models.modules import probing

__all__ = ["Head", "final_hidden_states", "find_head", "is_backbone_run", "unwrap"]

_SCALE_FIELDS = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
    "output_logit_scale",
)
_SOFTCAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "final_logit_soft_cap", "output_logit_soft_cap")
_ROUTE = "_agilerl_hidden_route"
_PROBE_TOKENS = 5

Route = Literal["backbone", "decoder", "head_input"]


@dataclass(frozen=True)
class Head:
    """The language-model head: ``logits = softcap * tanh(scale * module(hidden) / softcap)``."""

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits, V."""
        weight = getattr(self.module, "weight", None)
        return weight.shape[0] if isinstance(weight, Tensor) else int(getattr(self.module, "out_features", 1))

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [V, H] and bias [V] where the module is a plain linear layer without adapter, else None."""
        if type(self.module) is not nn.Linear:
            return None
        return self.module.weight, self.module.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of ``hidden`` [..., H], whatever the module is."""
        weight = getattr(self.module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype != hidden.dtype:
            hidden = hidden.to(weight.dtype)  # backbones that end in float32, such as Mamba's
        return apply_map(self.module(hidden), self.scale, self.softcap)


def apply_map(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scale and softcap of the head's output."""
    logits = raw if scale == 1.0 else raw * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a ``PeftModel``, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]


def final_hidden_states(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Hidden states [B, L, H] that enter the head; the head itself is not run on them.

    Args:
        model: A causal LM or a ``PeftModel`` around one.
        inputs: Keyword arguments of the model (``input_ids``, ``attention_mask``, ``position_ids``, images ...).
    """
    base = unwrap(model)
    return _run(base, getattr(base, _ROUTE, "backbone"), inputs)


def is_backbone_run(model: nn.Module) -> bool:
    """Whether `final_hidden_states` is a plain call of the backbone, without hooks set and taken away."""
    return getattr(unwrap(model), _ROUTE, "backbone") == "backbone"


def find_head(model: nn.Module) -> Head:
    """Find the head and the maps after it, and prove on a few tokens that they give the model's logits.

    Remembers on the model how its final hidden states are reached. Weights, mode and the global generator stay as they
    were.

    Raises:
        ModelError: The model has no separate head, or its logits are not a known function of it.
    """
    base = unwrap(model)
    module = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if module is None or getattr(base.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(base).__name__} has no language-model head of its own; a decoder-only causal LM is needed."
        )
    device = next(base.parameters()).device
    if device.type == "meta":
        raise ModelError(
            "The head of a model on the meta device cannot be checked; find it before the weights are dropped."
        )
    vocab = _text_config(base).vocab_size
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device).unsqueeze(0) * 7 % min(vocab, 997)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with probing(base):
        scale, softcap = _find_map(base, module, inputs)
        head = Head(module, scale, softcap)
        setattr(base, _ROUTE, _find_route(base, head, inputs))
    return head


def _text_config(base: PreTrainedModel) -> Any:
    return base.config.get_text_config()


def _find_map(base: PreTrainedModel, module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[float, float | None]:
    """Feed a ramp of known values through whatever the model does after its head, and name that function."""
    fed: list[Tensor] = []

    def feed(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        ramp = torch.linspace(-60.0, 60.0, output.numel(), device=output.device, dtype=torch.float32)
        fed.append(ramp.reshape(output.shape).to(output.dtype))
        return fed[-1].clone()  # some models scale in place

    handle = module.register_forward_hook(feed)
    try:
        got = base(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    if len(fed) != 1:
        raise ModelError(
            f"{type(base).__name__} does not call its output embedding once per forward pass ({len(fed)} calls)."
        )
    for scale, softcap in _candidate_maps(_text_config(base)):
        if _close(apply_map(fed[0], scale, softcap), got):
            return scale, softcap
    raise ModelError(
        f"The logits of {type(base).__name__} are not its head's output under any known scale or softcap; "
        "this model family cannot be trained exactly yet."
    )


def _candidate_maps(config: Any) -> Iterator[tuple[float, float | None]]:
    """Every reading of the configuration: a scale's name does not tell whether it multiplies or divides."""
    numbers = {
        name: float(value)
        for name in _SCALE_FIELDS + _SOFTCAP_FIELDS
        if isinstance(value := getattr(config, name, None), int | float) and value and math.isfinite(value)
    }
    scales = [1.0]
    for name in _SCALE_FIELDS:
        if name in numbers:
            scales += [numbers[name], 1.0 / numbers[name]]
    softcaps: list[float | None] = [None, *(numbers[name] for name in _SOFTCAP_FIELDS if name in numbers)]
    return ((scale, softcap) for softcap in softcaps for scale in dict.fromkeys(scales))


def _find_route(base: PreTrainedModel, head: Head, inputs: Mapping[str, Tensor]) -> Route:
    """Which way to the final hidden states gives what the model itself puts into its head."""
    truth, logits = _capture(base, head.module, inputs)
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"The logits of {type(base).__name__} are not finite on a few plain tokens: some of its weights are damaged, "
            "or overflow in its type."
        )
    if not _close(head.logits(truth), logits):
        raise ModelError(f"The head found for {type(base).__name__} does not reproduce the model's own logits.")
    routes: tuple[Route, ...] = ("backbone", "decoder", "head_input")
    for route in routes:
        try:
            got = _run(base, route, inputs)
        except (AttributeError, TypeError, NotImplementedError):
            continue
        if isinstance(got, Tensor) and got.shape == truth.shape and _close(got, truth):
            return route
    raise ModelError(
        f"The final hidden states of {type(base).__name__} cannot be reached; this model family is not supported."
    )


def _capture(base: nn.Module, module: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        output = base(**inputs, use_cache=False)
    finally:
        handle.remove()
    return seen[0], output.logits


def _run(base: PreTrainedModel, route: Route, inputs: Mapping[str, Any]) -> Tensor:
    if route == "head_input":
        return _head_input(base, inputs)
    backbone: nn.Module = base.base_model if route == "backbone" else base.get_decoder()
    if backbone is base:
        raise AttributeError(f"{type(base).__name__} has no separate backbone")
    return backbone(**inputs, use_cache=False)[0]


def _head_input(base: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """For models with layers between backbone and head: run all, but let the head see one position only."""
    module: nn.Module = base.get_output_embeddings()  # type: ignore[assignment]
    seen: list[Tensor] = []

    def take(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args[0])
        return (args[0][:, :1],)

    handle = module.register_forward_pre_hook(take)
    try:
        base(**inputs, use_cache=False)
    finally:
        handle.remove()
    return seen[0]


def _close(got: Tensor, wanted: Tensor) -> bool:
    """Equal up to the rounding of the coarser type, relative to the largest value; finite."""
    eps = max(torch.finfo(got.dtype).eps, torch.finfo(wanted.dtype).eps, torch.finfo(torch.float32).eps)
    got, wanted = got.double(), wanted.double()
    limit = 32 * eps * max(float(wanted.abs().max()), 1e-6)
    return bool(torch.isfinite(wanted).all()) and float((got - wanted).abs().max()) <= limit
