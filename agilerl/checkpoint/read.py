"""Read a checkpoint: strictly, and without running anything that it brings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agilerl.checkpoint import layout
from agilerl.checkpoint.content import AdapterContent, CheckpointContent, FullModel
from agilerl.checkpoint.tensors import read_plain, read_safetensors
from agilerl.checkpoint.tokenizer import read_tokenizer
from agilerl.errors import CheckpointError

__all__ = ["read_adapter", "read_checkpoint"]


def read_checkpoint(
    path: str | os.PathLike[str], *, need_optimizer: bool = True, need_tokenizer: bool = True
) -> CheckpointContent:
    """Read the checkpoint at ``path`` into plain values on the CPU.

    Args:
        path: A folder written by :func:`write_checkpoint`, a copy of one, a kept version or a member of a population.
        need_optimizer: False drops the optimizer state.
        need_tokenizer: False leaves the tokenizer unloaded.

    Raises:
        CheckpointError: Nothing there, incomplete, damaged, or holding anything but plain data.
    """
    root = Path(path)
    payload = layout.payload_of(root)
    while True:
        try:
            return _read(payload, need_optimizer, need_tokenizer)
        except CheckpointError:
            # Another process may have replaced the checkpoint, and removed this one, while it was being read.
            newer = layout.payload_of(root)
            if newer == payload:
                raise
            payload = newer


def _read(payload: Path, need_optimizer: bool, need_tokenizer: bool) -> CheckpointContent:
    file = payload / layout.ATTRIBUTES
    attributes = read_plain(file)
    fields = {"algorithm": str, "settings": dict, "state": dict, "base": dict, "adapters": list}
    for name, kind in fields.items():
        if not isinstance(attributes, dict) or not isinstance(attributes.get(name), kind):
            raise CheckpointError(f"{file} is not the file of a checkpoint: it has no {name!r} ({kind.__name__}).")
    adapters = {}
    for role in attributes["adapters"]:
        if role not in layout.ROLES:
            raise CheckpointError(f"{file} names the adapter {role!r}; roles are {', '.join(layout.ROLES)}.")
        adapters[role] = read_adapter(payload / role)
    training = payload / layout.TRAINING
    has_model = (payload / "actor" / "config.json").is_file()
    return CheckpointContent(
        algorithm=attributes["algorithm"],
        settings=attributes["settings"],
        state=attributes["state"],
        adapters=adapters,
        model_state=attributes.get("model_state"),
        full_model=_read_full_model(payload / "actor") if has_model else None,
        optimizer=attributes.get("optimizer") if need_optimizer else None,
        base=attributes["base"],
        tokenizer=read_tokenizer(payload) if need_tokenizer else None,
        training=read_plain(training) if training.exists() else None,
    )


def read_adapter(folder: Path) -> AdapterContent:
    """Read one PEFT adapter folder."""
    config = _read_json(folder / layout.ADAPTER_CONFIG)
    return AdapterContent(config, read_safetensors(folder / layout.ADAPTER_TENSORS))


def _read_full_model(folder: Path) -> FullModel:
    generation = folder / "generation_config.json"
    return FullModel(
        _read_json(folder / "config.json"),
        _read_json(generation) if generation.exists() else None,
        read_safetensors(folder / "model.safetensors"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read; the checkpoint is incomplete.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it must hold a JSON object.")
    return value
