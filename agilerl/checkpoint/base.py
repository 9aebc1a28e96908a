"""Find the base model of a checkpoint again, without a network, and compare it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agilerl.checkpoint.fingerprint import base_fingerprint, same_base
from agilerl.errors import ModelError

__all__ = ["check_base"]


def check_base(base: dict[str, Any], settings: dict[str, Any], base_model: str | None) -> tuple[bool | None, str]:
    """Compare the base model that a checkpoint names with the one that is found now.

    Args:
        base: ``name_or_path`` and ``fingerprint`` from the checkpoint.
        settings: The agent's settings, for the name and options it was loaded with.
        base_model: Where it is now, instead of its recorded name.

    Returns:
        Whether it is the same (None: not checked), and a sentence about it.
    """
    name = base_model or settings.get("model_name") or base.get("name_or_path")
    if not base.get("fingerprint"):
        return None, "not checked: the checkpoint holds no fingerprint of its base model"
    if not name:
        return None, "not checked: the base model was made in memory and has no name"
    if not _is_here(name):
        return None, f"not checked: the base model {name} is not on this machine; say where it is with --base"
    from agilerl.models import load_base_model

    options = {key: value for key, value in (settings.get("model_config") or {}).items() if key != "trust_remote_code"}
    try:
        with _quiet():
            model = load_base_model(name, model_config={**options, "local_files_only": True})
    except ModelError as error:
        return None, f"not checked: {error}"
    is_same = same_base(base["fingerprint"], base_fingerprint(model))
    if is_same is None:
        return None, "not checked: the fingerprint is of another version"
    if is_same:
        return True, f"{name} matches"
    return False, f"{name} is not the model that this checkpoint was trained on: its weights differ"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _is_here(name: str) -> bool:
    """Whether a model can be loaded without a network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from agilerl.models.presets import is_preset

    if is_preset(name) or Path(name).expanduser().is_dir():
        return True
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # a path that does not exist
        return False
