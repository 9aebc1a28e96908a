"""Tensor files: safetensors written block by block, and ``torch.save`` files that are read safely or not at all."""

from __future__ import annotations

import json
import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from agilerl.checkpoint.files import FileRecord, writing
from agilerl.errors import CheckpointError

__all__ = ["read_plain", "read_safetensors", "same_memory", "without_aliases", "write_plain", "write_safetensors"]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def same_memory(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor (tied weights)."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the first name of every tied tensor; models tie the others again when they load."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = same_memory(tensor)
        if key not in seen:
            seen.add(key)
            kept[name] = tensor
    return kept


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write the safetensors format (8-byte length, JSON header, raw little-endian values) without a second copy.

    The library's own writer maps the whole file or doubles it in memory; this one streams, hashes as it goes and fails
    with the system's own error on a full disk. Widest types come first, which keeps every tensor aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"Tensor {name} has type {tensor.dtype}, which safetensors cannot hold.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as sink:
        sink.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            values = tensors[name].detach().cpu().contiguous()
            if values.numel():
                sink.write(values.reshape(-1).view(torch.uint8).numpy())
    return sink.record()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into CPU memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def _own_storage(value: Any, memo: dict[tuple[Any, ...], Tensor]) -> Any:
    """Move tensors to the CPU and cut views loose, since ``torch.save`` writes a view's whole storage."""
    if isinstance(value, Tensor):
        key = same_memory(value)
        if key not in memo:
            host = value.detach().cpu()
            fits = host.untyped_storage().nbytes() == host.numel() * host.element_size()
            memo[key] = host if fits and host.is_contiguous() else host.contiguous().clone()
        return memo[key]
    if isinstance(value, dict):
        return {key: _own_storage(item, memo) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own_storage(item, memo) for item in value)
    return value


def write_plain(path: Path, value: Any) -> FileRecord:
    """``torch.save`` of plain containers and tensors; tied tensors are stored once."""
    with writing(path) as sink:
        torch.save(_own_storage(value, {}), cast(IO[bytes], sink))
    return sink.record()


def read_plain(path: Path) -> Any:
    """``torch.load`` that runs nothing from the file: numbers, texts, containers and tensors only."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks on foreign pickles, which are refused right after
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds something other than numbers, texts and tensors, or is damaged, and was not loaded."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged: {reason}.") from error
