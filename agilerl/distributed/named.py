"""Parameters and optimizer state by parameter name, whole, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.errors import CheckpointError

__all__ = ["collect_optimizer", "collect_parameters", "load_optimizer", "load_parameters"]

Gather = Callable[[Tensor], Tensor | None]
"""Whole tensor on the CPU where it is wanted (rank 0), ``None`` elsewhere; collective for sharded tensors."""
Place = Callable[[Tensor, Tensor], Tensor]
"""(whole tensor, tensor of the model that it belongs to) -> the part that this rank keeps, laid out like the latter."""


def collect_parameters(model: nn.Module, names: Iterable[str], gather: Gather) -> dict[str, Tensor]:
    """Whole tensors of the named parameters and buffers."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = list(names)
    if unknown := [name for name in wanted if name not in held]:
        raise CheckpointError(f"the model has no parameter {', '.join(unknown[:5])}.")
    found = {}
    for name in wanted:
        whole = gather(held[name].detach())
        if whole is not None:
            found[name] = whole
    return found


def load_parameters(model: nn.Module, tensors: Mapping[str, Tensor], place: Place) -> None:
    """Write whole tensors into the named parameters and buffers; names and shapes must fit."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in held:
            raise CheckpointError(f"the model has no parameter {name}.")
        if tuple(held[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the model's has shape {tuple(held[name].shape)}."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            _local(held[name]).copy_(_local(place(tensor, held[name])))


def collect_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, gather: Gather) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``; the state is empty off rank 0."""
    names = _names(model)
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = {}
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                entries[key] = gather(value.detach()) if isinstance(value, Tensor) else value
            if entries and None not in entries.values():
                state[names[parameter]] = entries
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], place: Place) -> None:
    """Restore what :func:`collect_optimizer` gave; parameters are matched by name, so their order may differ."""
    names = _names(model)
    mine = {names[p] for group in optimizer.param_groups for p in group["params"]}
    theirs = {name for group in state["param_groups"] for name in group["params"]}
    if mine != theirs:
        missing, extra = sorted(mine - theirs), sorted(theirs - mine)
        raise CheckpointError(
            f"the optimizer state belongs to other parameters: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} not in this model {extra[:3]}."
        )
    saved_groups = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in state["param_groups"]
        for name in group["params"]
    }
    for group in optimizer.param_groups:
        group.update(saved_groups[names[group["params"][0]]] if group["params"] else {})
        for parameter in group["params"]:
            saved = state["state"].get(names[parameter])
            optimizer.state.pop(parameter, None)
            if saved is not None:
                optimizer.state[parameter] = {
                    key: _restored(value, parameter, place, names[parameter]) for key, value in saved.items()
                }
                if group.get("fused") or group.get("capturable"):  # these want their step counter beside the weights
                    entries = optimizer.state[parameter]
                    entries.update({k: v.to(parameter.device) for k, v in entries.items() if isinstance(v, Tensor)})


def _restored(value: Any, parameter: nn.Parameter, place: Place, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:  # step counters stay where torch keeps them
        return value.clone()
    if tuple(value.shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"optimizer state of {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}."
        )
    return place(value, parameter)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
