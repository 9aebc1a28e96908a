"""Where a run computes, and in which type."""

from __future__ import annotations

import os

import torch

from agilerl.errors import ConfigError

__all__ = ["pick_device", "pick_dtype"]


def pick_device(name: str) -> str:
    """The device called ``name``; ``auto`` is this process's GPU if there is one.

    Raises:
        ConfigError: There is no such device.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ConfigError(f"model.device is {name}, but must be auto, cpu or cuda (cuda:1 ...).") from None
    if kind == "cuda" and not has_gpu:
        raise ConfigError(f"model.device is {name}, but there is no CUDA device here; use cpu or auto.")
    return name


def pick_dtype(name: str, device: str) -> str:
    """Type of the weights: what was asked for, else bfloat16 where a GPU computes in it and float32 elsewhere."""
    if name != "auto":
        return name
    return "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
