"""What keeps saved tensors from fitting the ones of a model."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

__all__ = ["misfits"]

_SHOWN = 8


def misfits(current: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, may_lack: Container[str] = ()) -> str:
    """Missing, unknown and misshapen tensors in one line; empty where everything fits.

    Args:
        current: Tensors of the model, by name.
        saved: Tensors that are to be written into them.
        may_lack: Names that need not be saved.
    """
    found = [f"missing {name}" for name in current if name not in saved and name not in may_lack]
    found += [f"unknown {name}" for name in saved if name not in current]
    found += [
        f"{name} has shape {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in current.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more
