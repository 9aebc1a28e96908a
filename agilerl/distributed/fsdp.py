"""Models sharded by block with FSDP2, optionally split by matrix as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agilerl.distributed import named, skeleton
from agilerl.distributed.checkpointing import set_gradient_checkpointing
from agilerl.distributed.collectives import Collectives, told
from agilerl.distributed.config import FSDPConfig
from agilerl.distributed.dense import all_reduce_gradients, synchronise
from agilerl.distributed.meshes import make_meshes
from agilerl.distributed.optimizer import keep_state_on_host, separate_kinds
from agilerl.distributed.shards import local, local_box, mesh_names, place, replicas, whole_on_cpu
from agilerl.distributed.tensor_parallel import PARTIAL, mark_partial_gradients, split_blocks
from agilerl.distributed.units import close_units, expect_outer_gradients, open_units, shard_units, sync_gradients
from agilerl.errors import ConfigError, UnsupportedError

__all__ = ["FSDPRuntime"]


class FSDPRuntime(Collectives):
    """A model sharded over the ranks; works with one process too.

    Args:
        device: Where the model computes.
        config: How it is sharded.

    Raises:
        ConfigError: The configuration does not fit the number of ranks.
    """

    lockstep = True

    def __init__(self, device: torch.device | str, config: FSDPConfig) -> None:
        super().__init__(device, even_alone=True)
        self.config = config
        self._meshes = make_meshes(self.device.type, config)
        self.dp_rank, self.dp_size = self._meshes.dp_rank, self._meshes.dp_size
        self.dp_group = self._meshes.dp_group
        self._files: WeakKeyDictionary[nn.Module, skeleton.WeightFiles] = WeakKeyDictionary()
        self._hollow: WeakKeyDictionary[nn.Module, tuple[nn.Module, bool]] = WeakKeyDictionary()

    # -- building ----------------------------------------------------------------------------------------------------

    def load_base(
        self, name: str, load: Callable[[], nn.Module], *, needs_weights: bool = False, **from_pretrained: Any
    ) -> nn.Module:
        """A skeleton that :meth:`prepare` fills, or the whole model where its files cannot be read by slices.

        Args:
            name: Local folder or name on the Hub.
            load: Loads the whole model.
            needs_weights: Load the whole model (adapters that start from the base weights, such as DoRA or PiSSA).
            from_pretrained: Keyword arguments of ``from_pretrained``.
        """
        dtype = from_pretrained.pop("dtype", None)
        understood = {"trust_remote_code", "attn_implementation"}
        if needs_weights or set(from_pretrained) - understood:
            return load()
        folder = _folder(name)
        built = None if folder is None else skeleton.build_skeleton(folder, dtype, **from_pretrained)
        if built is None:
            return load()
        model, files = built
        model.config._name_or_path = name  # type: ignore[union-attr]
        self._files[model] = files
        return model

    def adding_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around adding adapters to a skeleton: their initial values stay."""
        return skeleton.adapters_stay_real()

    def readable(self, model: nn.Module) -> nn.Module:
        """The model itself; for a skeleton a copy whose weights are mapped from its files, read as they are touched."""
        if model not in self._files:
            return model
        view = skeleton.hollow_copy(model)
        files = self._files[model]
        skeleton.fill(view, lambda name, _parameter: files.read(name, ()), torch.device("cpu"))
        return view

    def prepare(self, model: nn.Module, *, gradient_checkpointing: bool) -> nn.Module:
        """Shard ``model`` in place; a skeleton is filled with the slices that this rank keeps."""
        _refuse_quantised(model)
        is_hollow = any(parameter.is_meta for parameter in model.parameters())
        read = None
        if is_hollow:
            skeleton.check_adapters_are_real(model)
            files = next((self._files[module] for module in model.modules() if module in self._files), None)
            if files is None:
                raise ConfigError("the model has parameters on the meta device, and no files to fill them from.")
            read = _from_files(files)
        elif self.world_size > 1:
            with told():
                synchronise(model, self._wire)
        return self._shard(model, gradient_checkpointing, read)

    def _shard(self, model: nn.Module, gradient_checkpointing: bool, read: skeleton.Read | None) -> nn.Module:
        hollow = skeleton.hollow_copy(model)
        config = self.config
        set_gradient_checkpointing(
            model,
            gradient_checkpointing,
            every_n_blocks=config.checkpoint_every_n_blocks,
            skip_layer_types=config.checkpoint_skip_layer_types,
        )
        with told():
            if self._meshes.tp is not None:
                split_blocks(model, self._meshes.tp)
            shard_units(model, self._meshes.shard, config, self.device)
            if read is not None:
                home = torch.device("cpu") if config.cpu_offload else self.device
                skeleton.fill(model, read, home)
            if self._meshes.tp is not None:
                mark_partial_gradients(model)
        self._hollow[model] = (hollow, gradient_checkpointing)
        return model

    def clone_model(self, model: nn.Module) -> nn.Module | None:
        """A second sharded model: frozen shards are the same tensors, trainable ones are copies."""
        hollow, gradient_checkpointing = self._hollow[model]
        close_units(model)
        held = dict(model.named_parameters())

        def read(name: str, _parameter: nn.Parameter) -> Tensor:
            mine = held[name]
            return local(mine).detach().clone() if mine.requires_grad else mine

        copy = skeleton.hollow_copy(hollow)
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(held[name].requires_grad)
        with torch.no_grad():
            buffers = dict(model.named_buffers())
            copy = self._shard(copy, gradient_checkpointing, read)
            for name, buffer in copy.named_buffers():
                buffer.copy_(buffers[name])
        return copy.train(model.training)

    def unprepare(self, model: nn.Module) -> nn.Module:
        """A whole model on the CPU of every rank, with this model's weights."""
        close_units(model)
        hollow, _ = self._hollow[model]
        wholes = {}
        with told():
            for name, parameter in model.named_parameters():
                wholes[name] = whole_on_cpu(parameter.detach(), self.device, wanted=True)
        skeleton.fill(hollow, lambda name, _parameter: wholes[name], torch.device("cpu"))
        set_gradient_checkpointing(hollow, False)
        return hollow.train(model.training)

    # -- running -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Around uses of parts of the model: what lies outside the blocks is gathered meanwhile."""
        with told():
            open_units(model)
            yield
            close_units(model)

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around one micro-batch; gradients are reduced in the last one, or in each without ``defer_grad_sync``."""
        sync_gradients(model, is_last or not self.config.defer_grad_sync, is_last)
        with self.running(model):
            expect_outer_gradients(model)
            yield

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients that FSDP2 does not: of parameters kept whole, and of norms within split attention."""
        parameters = list(parameters)
        with told():
            if self.dp_size > 1:
                whole = [p for p in parameters if "shard" not in mesh_names(p)]
                all_reduce_gradients(whole, self.dp_group, self._wire)
            if self._meshes.tp is not None:
                for parameter in parameters:
                    if hasattr(parameter, PARTIAL) and parameter.grad is not None:
                        dist.all_reduce(local(parameter.grad), group=self._meshes.tp.get_group())

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """2-norm over all gradients of the whole model, accumulated in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            part = local(parameter.grad)
            wide = torch.float64 if part.dtype == torch.float64 else torch.float32
            square = torch.linalg.vector_norm(part, dtype=wide).double().square()
            total += square.to(self.device) / replicas(parameter.grad, self.world_size)
        if self.world_size > 1:
            with told():
                dist.all_reduce(total)
        return total.sqrt()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep moments in host memory where asked; never mix sharded and whole tensors in one fused call."""
        separate_kinds(optimizer)
        if self.config.offloads_optimizer and self.device.type != "cpu" and not self.config.cpu_offload:
            keep_state_on_host(optimizer)

    # -- by name -----------------------------------------------------------------------------------------------------

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of rank 0, empty elsewhere; every rank must give the same names."""
        with told():
            found = {name: self._gather(tensor) for name, tensor in tensors.items()}
        return {name: whole for name, whole in found.items() if whole is not None}

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Write a whole tensor, given on every rank, into ``target`` in place."""
        with torch.no_grad():
            local(target).copy_(local(place(value, target)))

    def collect_parameters(self, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of rank 0, empty elsewhere."""
        close_units(model)
        with told():
            return named.collect_parameters(model, names, self._gather)

    def collect_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Optimizer state by parameter name on rank 0."""
        close_units(model)
        with told():
            return named.collect_optimizer(model, optimizer, self._gather)

    def load_parameters(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write whole tensors, given on every rank, into the shards."""
        close_units(model)
        named.load_parameters(model, tensors, place)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Restore optimizer state, given on every rank."""
        close_units(model)
        named.load_optimizer(model, optimizer, state, place)

    def _gather(self, tensor: Tensor) -> Tensor | None:
        return whole_on_cpu(tensor, self.device, wanted=self.is_main)


def _from_files(files: skeleton.WeightFiles) -> skeleton.Read:
    def read(name: str, parameter: nn.Parameter) -> Tensor:
        return files.read(skeleton.key_in_files(name), local_box(parameter))

    return read


def _folder(name: str) -> Path | None:
    """The local folder of a model; one on the Hub is fetched first."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, allow_patterns=["*.json", "*.safetensors"])
    try:
        return Path(fetch())
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None  # the whole-model path says what is wrong with the name


def _refuse_quantised(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes"):
            raise UnsupportedError(
                "a quantised model cannot be sharded by this version: leave fsdp_config=None (each rank then holds the "
                "quantised base and only adapter gradients travel), or load the model unquantised."
            )
