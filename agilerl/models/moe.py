"""LoRA on routed experts whose weights are packed into one tensor, without any expert's dense delta.

PEFT wraps such a parameter (``target_parameters``) and adds ``B @ A`` to the whole stack of experts in every forward pass: a
second tensor of the size of all experts. Here the same adapters act on activations instead. For the tokens routed to expert
e, with packed weight W and PEFT's own factors A and B,

    y = x W[e]^T + scaling * (x A[e]^T) B[e]^T

The parameters, their names and shapes stay PEFT's; only the computation is replaced. Merged, disabled or several adapters
go PEFT's way.
"""

from __future__ import annotations

import copy
import inspect
import logging
from functools import lru_cache, partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["install", "set_recompute"]

logger = logging.getLogger(__name__)

_EXPERTS_INTERFACE = ("num_experts", "is_transposed", "has_bias", "has_gate", "_apply_gate")
_NUM_ARGUMENTS = 3
"""Hidden states, indices and weights of the chosen experts; families name the latter two differently."""

_PROBED_EXPERTS = 4

Factors = tuple[Tensor, Tensor, float]
"""lhs [E, a, r], rhs [E, r, b] and scaling: the delta of the packed parameter is ``scaling * lhs @ rhs``."""


class _GroupedExperts:
    """Mixed in before the outermost wrapper of an experts module."""

    _agilerl_recompute: bool | None
    _agilerl_block: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        wrappers, experts = _unwrap(self)  # type: ignore[arg-type]
        inputs = _bind(_arguments(experts), args, kwargs)
        if inputs is None or not all(_is_plain(wrapper) for wrapper in wrappers.values()):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        run = partial(_grouped_forward, experts, wrappers)
        if torch.is_grad_enabled() and self._recomputes():
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
        return run(*inputs)

    def _recomputes(self) -> bool:
        if self._agilerl_recompute is not None:
            return self._agilerl_recompute
        # Inside a checkpointed block the experts are recomputed with it: once more would only cost time.
        return not any(
            getattr(block, "gradient_checkpointing", False) and block.training for block in self._agilerl_block
        )


def install(model: nn.Module, *, recompute: bool | None = None) -> int:
    """Let routed-expert adapters compute by groups of tokens, where a probe shows that the result is PEFT's.

    Args:
        model: A ``PeftModel``.
        recompute: Recompute the experts' activations in the backward pass: True or False force it, None does so only
            outside of checkpointed blocks.

    Returns:
        Number of experts modules that were taken over.
    """
    count = 0
    verdicts: dict[Any, bool] = {}
    blocks = [(name, m) for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
    for name, wrapper in _outermost(model):
        wrappers, experts = _unwrap(wrapper)
        shapes = tuple(sorted((n, tuple(w.get_param().shape)) for n, w in wrappers.items()))
        kind = (type(experts), shapes)
        if kind not in verdicts:
            verdicts[kind] = _fits(experts) and _agrees(wrapper, wrappers, experts)
            if not verdicts[kind]:
                logger.warning(
                    "LoRA on %s (%s) goes through PEFT's dense deltas: this kind of experts is not known to compute by groups.",
                    name,
                    type(experts).__name__,
                )
        if not verdicts[kind]:
            continue
        # Instance attributes of plain type, and the block in a tuple, so that it is not registered as a sub-module.
        wrapper._agilerl_recompute = recompute  # type: ignore[assignment]
        wrapper._agilerl_block = tuple(m for outer, m in blocks if name.startswith(outer + ".") or not outer)  # type: ignore
        wrapper.__class__ = _mixed(type(wrapper))
        count += 1
    return count


def set_recompute(model: nn.Module, recompute: bool | None) -> None:
    """Change what `install` was told about recomputing."""
    for module in model.modules():
        if isinstance(module, _GroupedExperts):
            module._agilerl_recompute = recompute


@lru_cache(maxsize=16)
def _mixed(cls: type) -> type:
    """PEFT's class with ours before it; it keeps the name, so that lookups by class name stay the same."""
    return type(cls.__name__, (_GroupedExperts, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _outermost(model: nn.Module) -> list[tuple[str, ParamWrapper]]:
    found: list[tuple[str, ParamWrapper]] = []
    for name, module in model.named_modules():
        is_inner = found and name.startswith(found[-1][0] + ".")
        if isinstance(module, ParamWrapper) and not is_inner:
            found.append((name, module))
    return [(name, module) for name, module in found if not isinstance(module, _GroupedExperts)]


def _unwrap(wrapper: ParamWrapper) -> tuple[dict[str, ParamWrapper], nn.Module]:
    """Adapted parameter name -> its wrapper, and the experts module inside all of them."""
    wrappers: dict[str, ParamWrapper] = {}
    module: Any = wrapper
    while isinstance(module, ParamWrapper):
        wrappers[module.parameter_name] = module
        module = module.base_layer
    return wrappers, module


def _is_plain(wrapper: ParamWrapper) -> bool:
    """Whether exactly one adapter acts, unmerged, on a parameter that is frozen."""
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    return not wrapper.disable_adapters and not wrapper.merged and len(active) == 1


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """Hidden states, indices and weights however they were passed; None for any other call."""
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or set(given) != set(names):
        return None
    return [given[name] for name in names]


def _arguments(experts: nn.Module) -> tuple[str, ...]:
    return _argument_names(type(experts))


@lru_cache(maxsize=64)
def _argument_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]


def _fits(experts: nn.Module) -> bool:
    has_interface = all(hasattr(experts, name) for name in _EXPERTS_INTERFACE)
    has_norm = bool(getattr(experts, "has_post_expert_norm", False))
    return (
        has_interface and not has_norm and len(_arguments(experts)) == _NUM_ARGUMENTS and hasattr(experts, "down_proj")
    )


@torch.no_grad()
def _agrees(wrapper: ParamWrapper, wrappers: dict[str, ParamWrapper], experts: nn.Module) -> bool:
    """Compare with PEFT's forward on a few tokens and experts, in a small copy whose adapters are not zero."""
    param: Tensor = wrapper.get_param()  # type: ignore[assignment]
    if param.device.type == "meta" or type(param) is not nn.Parameter:
        return True  # nothing to compute with: the interface decides
    generator = torch.Generator().manual_seed(0)
    up = wrappers.get("gate_up_proj") or wrappers.get("up_proj")
    size = int((up.in_features if up is not None else wrappers["down_proj"].out_features) or 0)
    count = min(_PROBED_EXPERTS, int(experts.num_experts))  # type: ignore[arg-type]
    hidden = torch.randn(6, size, generator=generator).to(param.device, param.dtype)
    index = torch.stack([torch.randperm(count, generator=generator)[: min(2, count)] for _ in range(6)])
    weights = torch.rand(index.shape, generator=generator).to(param.device, param.dtype)
    try:
        small = _with_fewer_experts(wrapper, count, generator)
        index = index.to(param.device)
        wanted = small(hidden, index, weights).double()
        few, base = _unwrap(small)
        found = _grouped_forward(base, few, hidden, index, weights).double()
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        logger.debug("The probe of %s failed: %s", type(experts).__name__, error)
        return False
    tolerance = 64 * torch.finfo(param.dtype).eps * max(1.0, float(wanted.abs().max()))
    return bool(torch.isfinite(wanted).all()) and float((found - wanted).abs().max()) <= tolerance


def _with_fewer_experts(module: Any, count: int, generator: torch.Generator) -> Any:
    """A copy of a wrapper, or of the experts in it, with the first ``count`` experts and an adapter drawn at random.

    PEFT's forward pass on all of them would make the very tensors that this file avoids.
    """
    small = copy.copy(module)
    total = int(module.num_experts)
    held = small.__dict__
    held["_modules"], held["num_experts"] = dict(module._modules), count
    if not isinstance(module, ParamWrapper):
        held["_parameters"] = {
            name: nn.Parameter(p[:count].clone(), requires_grad=False) if p is not None and len(p) == total else p
            for name, p in module._parameters.items()
        }
        return small
    name = next(name for name in module.active_adapters if name in module.lora_A)
    for side in ("lora_A", "lora_B"):
        weight: Tensor = getattr(module, side)[name].weight
        # A stacks experts by rows, one after the other; B has them as the fastest of its columns.
        shape = (count * (len(weight) // total), weight.shape[1])
        if side == "lora_B":
            shape = (len(weight), weight.shape[1] // total * count)
        layer = nn.Linear(shape[1], shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight.copy_(torch.randn(shape, generator=generator) * 0.1)
        held["_modules"][side] = nn.ModuleDict({name: layer})
    held["_modules"]["base_layer"] = _with_fewer_experts(module.base_layer, count, generator)
    return small


def _grouped_forward(
    experts: Any, wrappers: dict[str, ParamWrapper], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Output [T, H] of ``hidden`` [T, H] with ``index`` and ``weights`` [T, K]; tokens sorted by expert."""
    factors: dict[str, Factors] = {}
    for name, wrapper in wrappers.items():
        factors[name] = wrapper.get_delta_factors(next(a for a in wrapper.active_adapters if a in wrapper.lora_A))
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts).tolist()[: experts.num_experts]
    order = order[: sum(counts)]  # an index behind the last expert marks a token that another rank serves
    tokens = order // index.shape[1]  # [R]
    outputs = []
    for expert, rows in enumerate(hidden[tokens].split(counts)):
        if rows.shape[0]:
            inner = _linear(experts, first, expert, rows, factors)
            inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
            outputs.append(_linear(experts, "down_proj", expert, inner, factors))
    result = torch.zeros_like(hidden)
    if not outputs:
        return result
    scaled = torch.cat(outputs) * weights.reshape(-1)[order].unsqueeze(-1)
    return result.index_add(0, tokens, scaled.to(hidden.dtype))


def _linear(experts: Any, name: str, expert: int, rows: Tensor, factors: dict[str, Factors]) -> Tensor:
    """One expert's product with a packed parameter, its bias, and the low-rank part where it is adapted."""
    weight = getattr(experts, name)[expert]
    result = rows @ (weight if experts.is_transposed else weight.t())
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[expert]
    if name in factors:
        lhs, rhs, scaling = factors[name]
        down, up = (lhs[expert], rhs[expert]) if experts.is_transposed else (rhs[expert].t(), lhs[expert].t())
        result = result + (rows @ down) @ up * scaling
    return result
