"""Read a checkpoint: strictly, and without running anything that it brings."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from agilerl.checkpoint import layout
from agilerl.checkpoint.content import AdapterContent, CheckpointContent, FullModel
from agilerl.checkpoint.manifest import read_manifest, safe_file
from agilerl.checkpoint.tensors import read_plain, read_safetensors
from agilerl.checkpoint.tokenizer import read_tokenizer
from agilerl.errors import CheckpointError

__all__ = ["read_adapter", "read_attributes", "read_checkpoint", "read_full_model"]

log = logging.getLogger(__name__)


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
    _check_sizes(payload)
    attributes = read_attributes(payload)
    adapters = {role: read_adapter(payload / role) for role in attributes["adapters"]}
    training = payload / layout.TRAINING
    has_model = (payload / "actor" / "config.json").is_file()
    return CheckpointContent(
        algorithm=attributes["algorithm"],
        settings=attributes["settings"],
        state=attributes["state"],
        adapters=adapters,
        model_state=attributes.get("model_state"),
        full_model=read_full_model(payload / "actor") if has_model else None,
        optimizer=attributes.get("optimizer") if need_optimizer else None,
        base=attributes["base"],
        tokenizer=read_tokenizer(payload) if need_tokenizer else None,
        training=read_plain(training) if training.exists() else None,
    )


def read_attributes(payload: Path) -> dict[str, Any]:
    """Read ``attributes.pt`` and check that it is one.

    Raises:
        CheckpointError: It is not, or names an adapter that does not exist.
    """
    file = payload / layout.ATTRIBUTES
    attributes = read_plain(file)
    fields = {"algorithm": str, "settings": dict, "state": dict, "base": dict, "adapters": list}
    for name, kind in fields.items():
        if not isinstance(attributes, dict) or not isinstance(attributes.get(name), kind):
            raise CheckpointError(f"{file} is not the file of a checkpoint: it has no {name!r} ({kind.__name__}).")
    for role in attributes["adapters"]:
        if role not in layout.ROLES:
            raise CheckpointError(f"{file} names the adapter {role!r}; roles are {', '.join(layout.ROLES)}.")
    _disarm(attributes["settings"])
    return attributes


def _disarm(settings: dict[str, Any]) -> None:
    """Drop model options that would run code of someone else's; who loads must ask for that by name."""
    options = settings.get("model_config")
    if not isinstance(options, dict):
        return
    for name in ("trust_remote_code", "code_revision", "use_kernels", "kernel_config"):
        if options.pop(name, None):
            log.warning("The checkpoint asks for %s; this is not honoured unless you pass it yourself.", name)
    attention = options.get("attn_implementation")
    if isinstance(attention, str) and "/" in attention:  # a kernel from the Hub
        log.warning("The checkpoint asks for the attention %s; the default is used instead.", attention)
        del options["attn_implementation"]


def _check_sizes(payload: Path) -> None:
    """Catch a cut-off file before it is read; ``verify`` compares hashes, which takes longer."""
    if not (payload / layout.MANIFEST).exists():
        return  # some files of a checkpoint, copied by hand
    for name, record in read_manifest(payload).files.items():
        path = safe_file(payload, name)
        size = path.stat().st_size if path.is_file() else -1
        if size != record.size:
            found = "is missing" if size < 0 else f"has {size} bytes instead of {record.size}"
            raise CheckpointError(f"{path} {found}; the checkpoint is damaged.")


def read_adapter(folder: Path) -> AdapterContent:
    """Read one PEFT adapter folder."""
    config = _read_json(folder / layout.ADAPTER_CONFIG)
    return AdapterContent(config, read_safetensors(folder / layout.ADAPTER_TENSORS))


def read_full_model(folder: Path) -> FullModel:
    """Read an ordinary model folder."""
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
