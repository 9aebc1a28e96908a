"""Models without weights: built in no memory, filled after sharding by the slices that a rank keeps."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.distributed.shards import local, local_box, with_local
from agilerl.errors import ModelError, UnsupportedError

__all__ = ["WeightFiles", "adapters_stay_real", "build_skeleton", "fill", "hollow_copy", "parameters_on_meta"]

Read = Callable[[str, nn.Parameter], Tensor | None]
"""(name, skeleton parameter) -> this rank's part, ``None`` for one to leave."""


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory; buffers are real, so rotary tables need no repair."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextlib.contextmanager
def adapters_stay_real() -> Iterator[None]:
    """PEFT moves a new adapter to its base layer's device; on a skeleton that would lose its initial values."""
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    move, replace = BaseTunerLayer._move_adapter_to_device_of_base_layer, LoraModel._replace_module

    def cast_only(layer: Any, adapter_name: str, device: torch.device | None = None) -> None:
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None or not weight.is_meta:
            move(layer, adapter_name, device)
            return
        for name in (*layer.adapter_layer_names, *layer.other_param_names):
            held = getattr(layer, name, None)
            if isinstance(held, nn.ModuleDict | nn.ParameterDict) and adapter_name in held:
                held[adapter_name] = held[adapter_name].to(dtype=weight.dtype)

    def replace_and_restore(
        tuner: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        real = {name: p.data for name, p in new_module.named_parameters() if not p.is_meta}
        replace(tuner, parent, child_name, new_module, child)  # moves adapters too
        for name, parameter in list(new_module.named_parameters()):
            if name in real and parameter.is_meta:
                owner, _, attribute = name.rpartition(".")
                kept = nn.Parameter(real[name], requires_grad=parameter.requires_grad)
                new_module.get_submodule(owner)._parameters[attribute] = kept

    BaseTunerLayer._move_adapter_to_device_of_base_layer = cast_only  # type: ignore[method-assign]
    LoraModel._replace_module = replace_and_restore  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseTunerLayer._move_adapter_to_device_of_base_layer = move  # type: ignore[method-assign]
        LoraModel._replace_module = replace  # type: ignore[method-assign]


class WeightFiles:
    """The safetensors files of one model, read by slices.

    Args:
        folder: Folder with ``model.safetensors`` or an index of several files.

    Raises:
        ModelError: The folder holds no safetensors.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for file in set(names.values()):
                if Path(file).name != file:
                    raise ModelError(f"{index} names a file outside its folder: {file!r}.")
            files = sorted(set(names.values()))
        else:
            files = ["model.safetensors"]
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise ModelError(f"{folder} lacks {missing[0]}.")
        self._handles: dict[str, Any] = {}
        for file in files:
            handle = safe_open(str(folder / file), framework="pt")
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a stored tensor, ``None`` if there is none of that name."""
        return tuple(self._handles[key].get_slice(key).get_shape()) if key in self._handles else None

    def read(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """The part ``box`` of a stored tensor, copied out of the file."""
        if not box:
            return self._handles[key].get_tensor(key)
        if any(part.stop <= part.start for part in box):
            shape = [max(0, part.stop - part.start) for part in box]
            return torch.empty(shape, dtype=self._handles[key].get_slice(key)[tuple(slice(0, 1) for _ in box)].dtype)
        return self._handles[key].get_slice(key)[box].clone()


def build_skeleton(
    folder: Path, dtype: torch.dtype | str | None, **settings: Any
) -> tuple[nn.Module, WeightFiles] | None:
    """A causal LM whose parameters are on the meta device, and the files that hold them.

    Returns:
        ``None`` where files and parameters do not match one to one (families whose keys are converted at load, such as
        packed experts): those must be loaded whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        files = WeightFiles(folder)
    except ModelError:
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.get("trust_remote_code", False))
    if config.get_text_config() is not config:  # a model that takes more than text is another class with other keys
        return None
    kind = getattr(config, "dtype", None) if dtype in (None, "auto") else dtype
    if isinstance(kind, str):
        kind = getattr(torch, kind)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=kind or torch.float32, **settings)
    model.tie_weights()
    unread = set(files._handles)
    for name, tensor in (*model.named_parameters(), *_persistent_buffers(model)):
        if files.shape(name) != tuple(tensor.shape):
            return None
        unread.discard(name)
        if not tensor.is_meta:
            tensor.data.copy_(files.read(name, local_box(tensor)))
    if unread - set(model.state_dict()):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval(), files


def key_in_files(name: str) -> str:
    """The stored key of a parameter, whatever PEFT has wrapped around its module."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    parts = name.split(".")
    while "modules_to_save" in parts:  # a trained copy starts as the original
        place = parts.index("modules_to_save")
        del parts[place : place + 2]
    return ".".join(parts)


def fill(model: nn.Module, read: Read, device: torch.device) -> None:
    """Give every parameter on the meta device memory and this rank's part of its values; ties stay ties."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    for name, parameter in list(model.named_parameters()):
        if not local(parameter).is_meta:
            continue
        part = read(name, parameter)
        if part is None:
            continue
        if isinstance(part, nn.Parameter):  # shared as it is
            filled = part
        else:
            shard = part.to(device, parameter.dtype).contiguous()
            filled = nn.Parameter(with_local(shard, parameter.data), requires_grad=parameter.requires_grad)
        for module, attribute in places[parameter]:
            module._parameters[attribute] = filled


def hollow_copy(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters take no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def check_adapters_are_real(model: nn.Module) -> None:
    """Refuse adapters whose initial values are computed from base weights that a skeleton does not have."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and "lora_" in name:
            raise UnsupportedError(
                f"{name} starts from the base weights, which are not loaded yet under FSDP: pass needs_weights=True to "
                "load_base (every rank then loads the whole model once)."
            )


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(model.state_dict())
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
