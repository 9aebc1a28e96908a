"""Is a checkpoint complete, undamaged, sane, and does its base model still match?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agilerl.checkpoint import layout
from agilerl.checkpoint.base import check_base
from agilerl.checkpoint.complete import Problem, file_problems
from agilerl.checkpoint.content import AdapterContent, FullModel
from agilerl.checkpoint.read import read_adapter, read_attributes, read_full_model
from agilerl.checkpoint.tensors import read_plain
from agilerl.errors import CheckpointError

__all__ = ["VerifyReport", "verify"]


@dataclass
class VerifyReport:
    """Result of :func:`verify`.

    Attributes:
        path: The checkpoint.
        problems: What is wrong, by file; empty for a good checkpoint.
        checked: What was looked at, for people.
        base: What was found about the base model.
    """

    path: Path
    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    base: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str], *, base_model: str | None = None) -> VerifyReport:
    """Check every file by size and hash, every tensor for shape and finite values, and the base model's fingerprint.

    Nothing in the checkpoint is executed and nothing is fetched from a network.

    Args:
        path: The checkpoint folder.
        base_model: Where the base model is now, if it has moved.

    Raises:
        CheckpointError: There is no checkpoint at ``path``.
    """
    root = Path(path)
    payload = _find(root)
    report = VerifyReport(root)
    report.problems += file_problems(payload)
    report.problems += _root_problems(root, payload)
    damaged = {problem.file for problem in report.problems}
    folders = [payload, *_members(payload)]
    for folder in folders:
        prefix = "" if folder == payload else folder.relative_to(payload).as_posix() + "/"
        _Contents(folder, prefix, damaged, report).check(base_model if folder == payload else None)
    if len(folders) > 1:
        report.checked.append(f"{len(folders) - 1} members of a population")
    return report


def _find(root: Path) -> Path:
    if not root.is_dir():
        return layout.payload_of(root)  # says what is wrong
    number = layout.current_version(root)
    payload = root if number is None else root / layout.VERSIONS / str(number)
    if not (payload / layout.MANIFEST).exists() and not (payload / layout.ATTRIBUTES).exists():
        raise CheckpointError(f"There is no checkpoint at {root}: {layout.describe_folder(root)}.")
    return payload


def _members(payload: Path) -> list[Path]:
    folder = payload / layout.POPULATION
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _root_problems(root: Path, payload: Path) -> list[Problem]:
    """Names that the root should show and does not."""
    if payload == root:
        return []
    names = [entry.name for entry in payload.iterdir() if not entry.name.startswith(".")]
    wrong = [n for n in names if not (root / n).exists() or (root / n).resolve() != (payload / n).resolve()]
    return [Problem(name, f"the folder {root} does not lead to it") for name in sorted(wrong)]


class _Contents:
    """Looks into the files of one payload that are whole."""

    def __init__(self, folder: Path, prefix: str, damaged: set[str], report: VerifyReport) -> None:
        self._folder = folder
        self._prefix = prefix
        self._damaged = damaged
        self._report = report

    def check(self, base_model: str | None) -> None:
        attributes = self._read(layout.ATTRIBUTES, lambda: read_attributes(self._folder))
        if (self._folder / layout.TRAINING).exists():
            self._read(layout.TRAINING, lambda: read_plain(self._folder / layout.TRAINING))
        adapters = {role: adapter for role in layout.ROLES if (adapter := self._adapter(role)) is not None}
        full_model = self._full_model()
        if attributes is None:
            self._report.base = self._report.base or f"not checked: {layout.ATTRIBUTES} cannot be read"
            return
        self._tensors(layout.ATTRIBUTES, attributes.get("model_state") or {}, "model_state")
        self._optimizer(attributes.get("optimizer"), attributes.get("model_state"), adapters, full_model)
        for role in attributes["adapters"]:
            if not (self._folder / role).is_dir():
                self._problem(f"{role}/{layout.ADAPTER_TENSORS}", "is missing")
        if not self._prefix:
            self._check_base(attributes, adapters, base_model)

    def _adapter(self, role: str) -> AdapterContent | None:
        file, config = f"{role}/{layout.ADAPTER_TENSORS}", f"{role}/{layout.ADAPTER_CONFIG}"
        if not (self._folder / config).exists():
            return None
        adapter = self._read(file, lambda: read_adapter(self._folder / role), config)
        if adapter is not None:
            self._tensors(file, adapter.tensors)
            self._adapter_shapes(file, adapter)
        return adapter

    def _full_model(self) -> FullModel | None:
        file, config = "actor/model.safetensors", "actor/config.json"
        if not (self._folder / config).exists():
            return None
        model = self._read(file, lambda: read_full_model(self._folder / "actor"), config)
        if model is not None:
            self._tensors(file, model.tensors)
            self._model_shapes(file, model)
        return model

    def _read(self, file: str, read: Callable[[], Any], *also: str) -> Any:
        """Result of ``read``; None where a file is known to be damaged or turns out to be."""
        if any(self._prefix + name in self._damaged for name in (file, *also)):
            return None
        try:
            return read()
        except CheckpointError as error:
            self._problem(file, str(error))
            return None

    def _problem(self, file: str, reason: str) -> None:
        self._report.problems.append(Problem(self._prefix + file, reason))

    def _tensors(self, file: str, tensors: Mapping[str, Any], where: str = "") -> None:
        count = 0
        for name, tensor in _tensors_in(tensors, where):
            count += 1
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                self._problem(file, f"{name} holds NaN or infinite values")
        if count:
            self._report.checked.append(f"{count} tensors in {self._prefix}{file}")

    def _adapter_shapes(self, file: str, adapter: AdapterContent) -> None:
        tensors = adapter.tensors
        for name, a in tensors.items():
            if ".lora_A." not in name or a.dim() != 2:
                continue
            b = tensors.get(name.replace(".lora_A.", ".lora_B."))
            if b is None:
                self._problem(file, f"{name} has no lora_B beside it")
            # Experts share one matrix per factor, (rank x experts) wide, so ranks are compared with each other only.
            elif b.dim() == 2 and b.shape[1] != a.shape[0]:
                self._problem(file, f"{name} has rank {a.shape[0]}, its lora_B {b.shape[1]}")
            elif not adapter.config.get("rank_pattern") and a.shape[0] % max(int(adapter.config.get("r") or 1), 1):
                self._problem(file, f"{name} has rank {a.shape[0]}, the config says r={adapter.config.get('r')}")

    def _model_shapes(self, file: str, model: FullModel) -> None:
        wanted = _shapes_of(model.config)
        for name, shape in wanted.items():
            found = model.tensors.get(name)
            if found is not None and tuple(found.shape) != shape:
                self._problem(file, f"{name} has shape {tuple(found.shape)}, the config means {shape}")

    def _optimizer(
        self,
        optimizer: dict[str, Any] | None,
        model_state: Mapping[str, Tensor] | None,
        adapters: Mapping[str, AdapterContent],
        full_model: FullModel | None,
    ) -> None:
        if optimizer is None:
            return
        self._tensors(layout.ATTRIBUTES, optimizer, "optimizer")
        shapes = {name: tensor.shape for name, tensor in (model_state or {}).items()}
        if full_model is not None:
            shapes |= {name: tensor.shape for name, tensor in full_model.tensors.items()}
        for role, adapter in adapters.items():
            names = [(name, tensor.shape) for name, tensor in adapter.tensors.items()]
            shapes |= {name.replace(".weight", f".{role}.weight"): shape for name, shape in names}
        for name, moments in optimizer.get("state", {}).items():
            for key, moment in moments.items() if isinstance(moments, dict) else []:
                is_sized = isinstance(moment, Tensor) and moment.dim() > 0
                if is_sized and name in shapes and moment.shape != shapes[name]:
                    shape = tuple(moment.shape)
                    self._problem(
                        layout.ATTRIBUTES, f"optimizer {key} of {name} has shape {shape}, it has {tuple(shapes[name])}"
                    )

    def _check_base(
        self, attributes: dict[str, Any], adapters: Mapping[str, AdapterContent], base_model: str | None
    ) -> None:
        if attributes["adapters"] and not adapters:
            self._report.base = "not checked: the adapter is damaged"
            return
        if not adapters:
            self._report.base = "not needed: all weights are in the checkpoint"
            return
        is_same, self._report.base = check_base(attributes["base"], attributes["settings"], base_model)
        if is_same is False:
            self._problem("base model", self._report.base)


def _tensors_in(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{where}[{i}]")


def _shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameter shapes that a model config means; empty for a model class that is not transformers' own."""
    import transformers

    name = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "config_class"):
        return {}
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(dict(config)))
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
