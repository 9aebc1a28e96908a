"""Whatever people call "the model": a checkpoint of ours, an adapter, a merged or ordinary model folder, a preset, a Hub name."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.checkpoint import read_checkpoint
from agilerl.data.images import tokenizer_of
from agilerl.errors import CheckpointError, ModelError
from agilerl.models import load_base_model, load_tokenizer
from agilerl.models.embeddings import stored_rows
from agilerl.models.quantization import build_bnb_quantization_config, require_bitsandbytes

__all__ = ["OpenModel", "adapter_settings", "load_adapter", "open_model"]


@dataclass
class OpenModel:
    """A model ready to answer, its tokenizer, and what it was made from."""

    model: Any
    tokenizer: Any
    kind: str
    """``adapter``, ``full checkpoint`` or ``model``."""
    base: str
    """Name of the base model, or of the model itself."""


def open_model(
    name: str,
    *,
    base: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    quantization: str = "none",
) -> OpenModel:
    """Open a model by folder or name; nothing stored in it is executed.

    Args:
        name: Checkpoint, adapter folder, model folder, preset or Hub name. A file inside one stands for its folder.
        base: Base model in place of the recorded one, for adapters that were moved to another machine.
        device: Where it runs.
        dtype: Type of the weights; ``None``: as stored.
        trust_remote_code: Run code that comes with the model.
        quantization: "nf4" or "int8" to hold the weights in 4 or 8 bit.

    Raises:
        ModelError: There is no such model, or the base cannot be found.
        CheckpointError: The checkpoint is damaged.
    """
    folder = Path(name).expanduser()
    folder = folder.parent if folder.is_file() else folder
    arguments: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if dtype is not None:
        arguments["dtype"] = dtype
    if (config := build_bnb_quantization_config(quantization)) is not None:
        require_bitsandbytes()
        arguments["quantization_config"] = config
    adapter = _adapter_folder(folder)
    if adapter is not None:
        opened = _open_adapter(adapter, folder, base, arguments)
    elif _is_model_folder(folder / "actor"):
        opened = _open_plain(str(folder / "actor"), arguments, "full checkpoint", _tokenizer_in(folder))
    elif _is_model_folder(folder) or not folder.exists():
        opened = _open_plain(name if not folder.exists() else str(folder), arguments, "model", None)
    elif (folder / "attributes.pt").is_file():
        opened = _open_state(folder, base)
    else:
        raise ModelError(f"{folder} holds neither a model nor an adapter; found: {_listing(folder)}.")
    opened.model.to(device).eval()
    return opened


def load_adapter(base: Any, folder: str | Path, *, is_trainable: bool = False) -> Any:
    """A ``PeftModel`` from a base and an adapter folder (or a checkpoint that holds one).

    Raises:
        ModelError: There is no adapter.
        CheckpointError: Its tensors do not fit the base.
    """
    from peft import PeftModel

    adapter = _existing_adapter(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, str(adapter), is_trainable=is_trainable)
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"The adapter in {adapter} does not fit the base model: {first}") from None
    missing = [str(one.message).splitlines()[0] for one in caught if "missing adapter keys" in str(one.message)]
    if missing:
        # A fresh random adapter in place of a trained one would answer like the base, and nobody would know.
        raise CheckpointError(f"The adapter in {adapter} is incomplete: {missing[0][:300]}")
    return model


def adapter_settings(folder: str | Path) -> Any:
    """PEFT's settings of the adapter in a folder, to train it further.

    Raises:
        ModelError: There is no adapter, or its settings cannot be read.
    """
    from peft import PeftConfig

    adapter = _existing_adapter(folder)
    try:
        settings = PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"The settings of the adapter in {adapter} cannot be read ({str(error).splitlines()[0]})."
        ) from None
    settings.inference_mode = False
    return settings


def _existing_adapter(folder: str | Path) -> Path:
    adapter = _adapter_folder(Path(folder).expanduser())
    if adapter is None:
        raise ModelError(f"{folder} holds no adapter (adapter_config.json); found: {_listing(Path(folder))}.")
    return adapter


def _open_adapter(adapter: Path, folder: Path, base: str | None, arguments: dict[str, Any]) -> OpenModel:
    recorded = _json(adapter / "adapter_config.json").get("base_model_name_or_path")
    name = base or recorded
    if not name:
        raise ModelError(f"The adapter in {adapter} does not say which model it belongs to; give it with --base.")
    try:
        model = load_base_model(name, model_config=arguments | _added_rows(folder, name))
    except ModelError as error:
        hint = "" if base else " If it was moved, give its place with --base."
        raise ModelError(f"The base model of {folder} cannot be loaded: {error}{hint}") from None
    tokenizer = _tokenizer_in(folder) or _tokenizer_in(adapter) or load_tokenizer(name)
    return OpenModel(load_adapter(model, adapter), tokenizer, "adapter", str(name))


def _added_rows(folder: Path, name: str) -> dict[str, Any]:
    """Rows of the embedding that training grew for added tokens, where a checkpoint of ours tells of any."""
    if not (folder / "attributes.pt").is_file():
        return {}
    rows = read_checkpoint(folder, need_optimizer=False, need_tokenizer=False).base.get("embedding_rows")
    stored = stored_rows(name)
    return {"embedding_rows": rows} if rows and stored and rows > stored else {}


def _open_plain(name: str, arguments: dict[str, Any], kind: str, tokenizer: Any) -> OpenModel:
    model = load_base_model(name, model_config=arguments)
    return OpenModel(model, tokenizer or load_tokenizer(name), kind, name)


def _open_state(folder: Path, base: str | None) -> OpenModel:
    """A checkpoint with all weights in one file (``lora_only=False``): the agent that wrote it knows how to build it."""
    from agilerl import algorithms

    content = read_checkpoint(folder, need_optimizer=False)
    kind = getattr(algorithms, content.algorithm, None)
    if kind is None or content.model_state is None:
        raise CheckpointError(f"{folder} holds no weights that can be opened (written by {content.algorithm}).")
    if base is not None:
        raise ModelError(f"{folder} holds all weights; leave --base out.")
    agent = kind.load(str(folder))
    name = str(content.base.get("name_or_path"))
    tokenizer = tokenizer_of(agent.tokenizer or content.tokenizer or load_tokenizer(name))
    return OpenModel(agent.actor, tokenizer, "full checkpoint", name)


def _adapter_folder(folder: Path) -> Path | None:
    return next((place for place in (folder, folder / "actor") if (place / "adapter_config.json").is_file()), None)


def _is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _tokenizer_in(folder: Path) -> Any:
    return load_tokenizer(str(folder)) if (folder / "tokenizer_config.json").is_file() else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object.")
    return value


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else "nothing"
