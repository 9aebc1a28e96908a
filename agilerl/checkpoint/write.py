"""Write a checkpoint: a new payload aside, complete and on the disk, then one link replaced."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from agilerl.checkpoint import layout
from agilerl.checkpoint.content import AdapterContent, CheckpointContent, FullModel
from agilerl.checkpoint.files import FileRecord, hash_file, output_errors, remove_tree, sync_folder, writing
from agilerl.checkpoint.manifest import Manifest, read_manifest, write_manifest
from agilerl.checkpoint.plain import json_safe, plain
from agilerl.checkpoint.tensors import without_aliases, write_plain, write_safetensors
from agilerl.checkpoint.tokenizer import tokenizer_files
from agilerl.errors import CheckpointError, OutputError

__all__ = ["remove_version", "store", "write_checkpoint", "write_payload", "writer_lock"]

log = logging.getLogger(__name__)


def write_checkpoint(
    content: CheckpointContent,
    path: str | os.PathLike[str],
    *,
    members: Sequence[CheckpointContent] = (),
    keep_history: bool = False,
    step: int | None = None,
    info: Mapping[str, Any] | None = None,
) -> int:
    """Make ``content`` the checkpoint at ``path``; at every instant the old or the new one is there in full.

    Args:
        content: What to save.
        path: The folder; made where missing. Files in it that a checkpoint does not own stay as they are.
        members: Agents of a population, saved with it under ``population/<k>/``.
        keep_history: Leave earlier payloads in ``.versions``.
        step: Position of the run, for the manifest.
        info: More for the manifest, such as the score.

    Returns:
        Number of the payload.

    Raises:
        OutputError: The folder cannot be written or is full; what was there before is untouched.
    """
    root = Path(path)
    with writer_lock(root):
        previous = layout.version_numbers(root)
        number = store(content, root, members=members, info={"step": step, **(info or {})})
        if not keep_history:
            for old in previous:
                remove_version(root, old)
    return number


def store(
    content: CheckpointContent, root: Path, *, members: Sequence[CheckpointContent] = (), info: Mapping[str, Any]
) -> int:
    """Write the next payload and make it current; the caller holds :func:`writer_lock`."""
    versions = root / layout.VERSIONS
    for leftover in versions.glob(".writing-*"):  # of a process that was killed
        remove_tree(leftover)
    number = max(layout.version_numbers(root), default=0) + 1
    aside = versions / f".writing-{number}"
    try:
        for k, member in enumerate(members):
            write_payload(member, aside / layout.POPULATION / str(k), {**info, "member": k})
        write_payload(content, aside, info)
        resolved = layout.check_free(root, [entry.name for entry in aside.iterdir()])
        aside.rename(versions / str(number))
    except BaseException:
        remove_tree(aside)
        raise
    sync_folder(versions)
    layout.publish(root, number, resolved)
    return number


@contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Let one writer into the folder, and turn system errors into one :class:`OutputError`.

    The system frees the lock when a process dies.
    """
    has_one = (root / layout.ATTRIBUTES).exists()
    consequence = "The checkpoint that was there is unharmed." if has_one else "Nothing was saved."
    with output_errors(root, consequence):
        (root / layout.VERSIONS).mkdir(parents=True, exist_ok=True)
        with (root / layout.VERSIONS / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"Another process is writing checkpoints to {root}; name another folder.") from None
            yield


def write_payload(content: CheckpointContent, folder: Path, info: Mapping[str, Any]) -> None:
    """Write all files of one checkpoint into a new folder, the manifest last."""
    payload = _Payload(folder)
    payload.put_members()
    for role, adapter in content.adapters.items():
        payload.put_adapter(role, adapter)
    if content.full_model is not None:
        payload.put_model("actor", content.full_model)
    if content.tokenizer is not None:
        for name, data in tokenizer_files(content.tokenizer).items():
            payload.put_bytes(name, data)
    if content.training is not None:
        payload.put_plain(layout.TRAINING, plain(content.training, "training"))
    fields = ("algorithm", "settings", "state", "model_state", "optimizer", "base")
    attributes = {name: plain(getattr(content, name), name) for name in fields}
    payload.put_plain(layout.ATTRIBUTES, attributes | {"adapters": sorted(content.adapters)})
    payload.finish({"algorithm": content.algorithm, "base": content.base, **info})


class _Payload:
    """A payload folder in the making, and the list of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        self.links: dict[str, str] = {}

    def put_bytes(self, name: str, data: bytes) -> None:
        with writing(self.folder / name) as sink:
            sink.write(data)
        self.files[name] = sink.record()

    def put_json(self, name: str, value: Any) -> None:
        text = json.dumps(json_safe(value, name), indent=2, sort_keys=True, allow_nan=False)
        self.put_bytes(name, f"{text}\n".encode())

    def put_plain(self, name: str, value: Any) -> None:
        self.files[name] = write_plain(self.folder / name, value)

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.files[name] = write_safetensors(self.folder / name, tensors)

    def put_adapter(self, role: str, adapter: AdapterContent) -> None:
        if role not in layout.ROLES:
            raise CheckpointError(f"Adapter role {role!r} cannot be saved; roles are {', '.join(layout.ROLES)}.")
        self.put_tensors(f"{role}/{layout.ADAPTER_TENSORS}", adapter.tensors)
        self.put_json(f"{role}/{layout.ADAPTER_CONFIG}", adapter.config)
        if role == "actor":  # PEFT loads the folder itself, too
            for name in (layout.ADAPTER_CONFIG, layout.ADAPTER_TENSORS):
                self.links[name] = f"{role}/{name}"

    def put_model(self, name: str, model: FullModel) -> None:
        self.put_json(f"{name}/config.json", model.config)
        if model.generation_config is not None:
            self.put_json(f"{name}/generation_config.json", model.generation_config)
        self.put_tensors(f"{name}/model.safetensors", without_aliases(model.tensors))

    def put_members(self) -> None:
        """Take over the lists of members that were written before."""
        below = self.folder / layout.POPULATION
        for member in sorted(below.iterdir()) if below.is_dir() else []:
            prefix, own = f"{layout.POPULATION}/{member.name}", read_manifest(member)
            self.files |= {f"{prefix}/{name}": record for name, record in own.files.items()}
            self.files[f"{prefix}/{layout.MANIFEST}"] = hash_file(member / layout.MANIFEST)
            self.links |= {f"{prefix}/{name}": f"{prefix}/{target}" for name, target in own.links.items()}

    def finish(self, info: Mapping[str, Any]) -> None:
        """Make the links, flush the folders, and write the manifest."""
        for name, target in self.links.items():
            link = self.folder / name
            if not link.is_symlink():  # a member's links are there already
                link.symlink_to(target)
        parents = {parent for name in self.files for parent in (self.folder / name).parents}
        for parent in sorted(parent for parent in parents if parent.is_relative_to(self.folder)):
            sync_folder(parent)
        write_manifest(self.folder, Manifest(self.files, self.links, json_safe(info, "info")))
        sync_folder(self.folder)


def remove_version(root: Path, number: int) -> None:
    """Delete a payload: the files that its manifest lists and folders that are empty then, nothing else."""
    payload = root / layout.VERSIONS / str(number)
    try:
        manifest = read_manifest(payload)
    except CheckpointError as error:
        log.debug("%s is left in place: %s", payload, error)
        return
    # The manifest goes first: a payload without one is never taken for complete.
    (payload / layout.MANIFEST).unlink()
    layout.remove_listed(payload, [*manifest.links, *manifest.files])
