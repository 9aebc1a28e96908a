"""What training asks of the processes, whatever their number and however the model is laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["Runtime"]


@runtime_checkable
class Runtime(Protocol):
    """One implementation per layout of the model: whole on every rank, or sharded."""

    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    """Which share of the rows this rank reads."""
    dp_size: int
    """Shares of the rows: world size, or world size / tensor-parallel degree."""
    is_main: bool
    lockstep: bool
    """Whether every data-parallel rank must run the same number of micro-batches (sharded models: yes)."""

    def load_base(
        self, name: str, load: Callable[[], nn.Module], *, needs_weights: bool = False, **from_pretrained: Any
    ) -> nn.Module:
        """The base model ``name``: ``load()`` itself, or a skeleton without weights that :meth:`prepare` fills.

        Args:
            name: Local folder, or name on the Hub.
            load: Loads the whole model; used where a skeleton will not do.
            needs_weights: Adapters will start from the base weights (DoRA, PiSSA): no skeleton.
            from_pretrained: Keyword arguments of ``from_pretrained`` (dtype, attn_implementation, ...).
        """
        ...

    def adding_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around adding adapters to a model that :meth:`load_base` gave: they get real values on a skeleton too."""
        ...

    def readable(self, model: nn.Module) -> nn.Module:
        """``model``, or for a skeleton a view of it whose weights can be read (and should be read sparingly)."""
        ...

    def prepare(self, model: nn.Module, *, gradient_checkpointing: bool) -> nn.Module:
        """Place or shard ``model``, switch checkpointing, make all ranks start from rank 0's weights."""
        ...

    def unprepare(self, model: nn.Module) -> nn.Module:
        """An ordinary whole model with the same weights, on the CPU (rank by rank)."""
        ...

    def clone_model(self, model: nn.Module) -> nn.Module | None:
        """A second prepared model on the same frozen shards; ``None`` where an ordinary copy does."""
        ...

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around any use of parts of ``model`` (its backbone, its head) outside :meth:`micro_step`."""
        ...

    def micro_step(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's forward and backward; ``is_last`` closes the optimizer step."""
        ...

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over data-parallel ranks; the loss is already divided by the global weight."""
        ...

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """2-norm over all gradients of the whole model, float64 scalar, the same on every rank."""
        ...

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply what the layout asks of the optimizer (state kept in host memory)."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over data-parallel ranks, in float64."""
        ...

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks; NaN wins."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        ...

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """``source``'s value on every rank (plain objects)."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole, detached tensors on the CPU of rank 0, empty elsewhere; not copied where that is not needed."""
        ...

    def copy_into(self, target: Tensor, value: Tensor) -> None:
        """Write a whole tensor, given on every rank, into a possibly sharded ``target`` in place."""
        ...

    def collect_parameters(self, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of rank 0, empty elsewhere. Every rank must call it with the same names."""
        ...

    def collect_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Optimizer state by parameter name, whole, on the CPU of rank 0: ``{"state": ..., "param_groups": ...}``."""
        ...

    def load_parameters(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write whole tensors, given on every rank, into the model."""
        ...

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`collect_optimizer` gave, on every rank."""
        ...
