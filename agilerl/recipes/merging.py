"""An adapter checkpoint -> an ordinary model folder, written aside and renamed."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from agilerl.errors import ModelError, OutputError
from agilerl.models.merge import merge_adapter
from agilerl.recipes.images import processor_of
from agilerl.recipes.open import OpenModel, open_model

__all__ = ["merge_checkpoint"]


def merge_checkpoint(
    checkpoint: str,
    output: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Path, float]:
    """Merge and save with the tokenizer and chat template.

    Returns:
        The folder, and how far the merged model's logits lie from the adapter's, relative to the largest.

    Raises:
        ModelError: There is no adapter to merge.
        OutputError: The folder is in use or cannot be written.
    """
    folder = Path(output).expanduser()
    _check_free(folder, overwrite)
    opened = open_model(checkpoint, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
    if opened.kind != "adapter":
        raise ModelError(f"{checkpoint} holds no adapter; it is an ordinary model already.")
    merged = merge_adapter(opened.model)
    encoder = _encoder(checkpoint, opened)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror or error}).") from None
    try:
        merged.model.save_pretrained(aside)
        encoder.save_pretrained(aside)
        aside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder, merged.error


def _encoder(checkpoint: str, opened: OpenModel) -> Any:
    """What encodes rows for the model: its processor where it reads images, else its tokenizer."""
    try:
        return processor_of(checkpoint, opened.base) or opened.tokenizer
    except ModelError as error:  # trained on text alone, it may never have been needed
        warnings.warn(
            f"The processor for images is not saved with the merged model: {error}", UserWarning, stacklevel=3
        )
        return opened.tokenizer


def _check_free(folder: Path, overwrite: bool) -> None:
    """Refuse what must not be replaced: a file, or a folder that is not a model that was saved there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    is_model = folder.is_dir() and (folder / "config.json").is_file() and not (folder / "attributes.pt").exists()
    if not (overwrite and is_model):
        hint = "use --overwrite to replace the model there" if is_model else "give another folder"
        raise OutputError(f"{folder} exists already; {hint}.")
