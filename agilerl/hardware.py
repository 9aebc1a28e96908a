"""What the processor at hand is good at."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["is_better_wide", "is_slow_to_start", "widened"]


@lru_cache(maxsize=8)
def _cpu_has_products(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of a half precision in hardware."""
    bfloat = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    names = bfloat if dtype == torch.bfloat16 else ("_is_amx_fp16_supported",)
    checks = [getattr(torch.cpu, name, None) for name in names]
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return not is_x86 or any(check is not None and check() for check in checks)


def is_better_wide(tensor: Tensor) -> bool:
    """Whether products with ``tensor`` should be computed in float32."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not _cpu_has_products(tensor.dtype)


def is_slow_to_start(tensor: Tensor) -> bool:
    """Whether products with ``tensor`` run on tiles (AMX), which small ones do not repay: setting up costs them most."""
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)
    is_here = tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
    return is_here and check is not None and bool(check())


def widened(tensor: Tensor) -> Tensor:
    """The operand of a product in the precision to compute it in; the tensor itself where that is its own."""
    return tensor.float() if is_better_wide(tensor) else tensor
