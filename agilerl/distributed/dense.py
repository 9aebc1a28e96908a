"""A whole model on every rank; only gradients of trainable parameters travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agilerl.distributed import named
from agilerl.distributed.checkpointing import set_gradient_checkpointing
from agilerl.distributed.collectives import Collectives, told

__all__ = ["DenseRuntime", "all_reduce_gradients", "synchronise"]

BUCKET_BYTES = 64 * 2**20


class DenseRuntime(Collectives):
    """One process, or data parallelism with a replica on every rank.

    Args:
        device: Where the model computes.
    """

    lockstep = False

    def load_base(
        self, name: str, load: Callable[[], nn.Module], *, needs_weights: bool = False, **from_pretrained: Any
    ) -> nn.Module:
        """``load()``; the other arguments serve sharded runtimes."""
        return load()

    def adding_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def readable(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def prepare(self, model: nn.Module, *, gradient_checkpointing: bool) -> nn.Module:
        """Move the model to the device, switch checkpointing, and give every rank rank 0's weights."""
        if any(
            tensor.device != self.device for tensor in model.parameters()
        ):  # quantised models refuse a needless move
            model = model.to(self.device)
        set_gradient_checkpointing(model, gradient_checkpointing)
        if self.world_size > 1:
            with told():
                synchronise(model, self._wire)
        return model

    def unprepare(self, model: nn.Module) -> nn.Module:
        """The model itself, without checkpointing."""
        set_gradient_checkpointing(model, False)
        return model

    def clone_model(self, model: nn.Module) -> nn.Module | None:
        """``None``: an ordinary copy on the same frozen tensors does."""
        return None

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Nothing to do: gradients pile up locally until :meth:`reduce_gradients`."""
        yield

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks; a parameter that has one on any rank has one on all afterwards."""
        if self.world_size > 1:
            with told():
                all_reduce_gradients(list(parameters), None, self._wire)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """2-norm over all gradients, accumulated in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in parameters:
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=_accumulator(parameter.grad)).double().square()
        return total.sqrt()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do."""

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors themselves on the CPU of rank 0 (no copy where they are there), empty elsewhere."""
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()} if self.is_main else {}

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Write ``value`` into ``target`` in place."""
        with torch.no_grad():
            target.copy_(value)

    def collect_parameters(self, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies on the CPU of rank 0, empty elsewhere; local, since all ranks hold the same."""
        return named.collect_parameters(model, names, self._gather)

    def collect_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Optimizer state by parameter name on the CPU of rank 0 (no copy where it is there), empty elsewhere."""
        return named.collect_optimizer(model, optimizer, lambda tensor: tensor.cpu() if self.is_main else None)

    def load_parameters(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write whole tensors into the model."""
        named.load_parameters(model, tensors, _like)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Restore optimizer state by parameter name."""
        named.load_optimizer(model, optimizer, state, _like)

    def _gather(self, tensor: Tensor) -> Tensor | None:
        return tensor.detach().to("cpu", copy=True) if self.is_main else None


def all_reduce_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, wire: torch.device) -> None:
    """Sum the gradients of whole parameters over ``group``, in buckets; half precision is summed in float32."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=wire)
    if not parameters:
        return
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, present in zip(parameters, has.tolist(), strict=True):
        if present:
            buckets.setdefault((_accumulator(parameter), parameter.device), []).append(parameter)
    for (dtype, _), members in buckets.items():
        for part in _parts(members, dtype):
            flat = torch.cat([_gradient(parameter).to(dtype).flatten() for parameter in part])
            dist.all_reduce(flat, group=group)
            for parameter, summed in zip(part, flat.split([p.numel() for p in part]), strict=True):
                _gradient(parameter).copy_(summed.view_as(parameter))


def synchronise(model: nn.Module, wire: torch.device) -> None:
    """Give every rank rank 0's weights; frozen ones only where a checksum differs."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for tensor in (t for t in tensors.values() if t.requires_grad):
        dist.broadcast(tensor.data, src=0)
    frozen = [t.data for t in tensors.values() if not t.requires_grad and t.numel()]
    sums = torch.stack([_checksum(tensor) for tensor in frozen]) if frozen else torch.zeros(0, dtype=torch.float64)
    reference = sums.to(wire, copy=True)  # not the same tensor: the broadcast overwrites it
    dist.broadcast(reference, src=0)
    differing = torch.ne(reference.to(sums.device), sums).to(torch.uint8).to(wire)
    dist.all_reduce(differing, op=dist.ReduceOp.MAX)
    for tensor, differs in zip(frozen, differing.tolist(), strict=True):
        if differs:
            dist.broadcast(tensor, src=0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # this rank had no row that reaches it
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _parts(parameters: list[nn.Parameter], dtype: torch.dtype) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        part.append(parameter)
        size += parameter.numel() * dtype.itemsize
        if size >= BUCKET_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _checksum(tensor: Tensor) -> Tensor:
    """Depends on every element."""
    flat = tensor.detach().reshape(-1)
    wide = torch.float64
    return flat.sum(dtype=wide) + flat[::7].abs().sum(dtype=wide) + flat[0].to(wide) - flat[-1].to(wide)


def _like(whole: Tensor, held: Tensor) -> Tensor:
    return whole.detach().to(held.device, held.dtype, copy=True)
