"""Vision-language models on the command line: when a run needs the model's processor, and where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agilerl.config import RunConfig
from agilerl.config.schema import ModelSection
from agilerl.llm_envs.make import holds_images
from agilerl.models.build import PROCESSOR_FILES, load_processor, takes_images

__all__ = ["processor_for", "processor_of", "scope_of"]


def processor_for(config: RunConfig, objective: str, *, model: str | None = None, saved: str | None = None) -> Any:
    """The processor of a run whose training rows have images; None for text, and for models that take nothing else.

    Args:
        config: The run.
        objective: "sft"; rows of pairs cannot have images.
        model: Name of the model in place of ``config.model.name``.
        saved: Folder that may hold a processor of its own; None: the adapter to go on from.

    Raises:
        DataError: The rows cannot be found.
        ModelError: The model has no processor, or it cannot be loaded here.
    """
    name, saved = model or config.model.name, saved or config.model.adapter
    if objective != "sft" or config.data.train is None:
        return None
    if not takes_images(name, trust_remote_code=config.model.trust_remote_code) or not holds_images(config.data):
        return None
    return processor_of(saved or name, name)


def processor_of(name: str, base: str) -> Any:
    """The processor that lies with a model or checkpoint, else its base model's; None where the base reads text only.

    Raises:
        ModelError: The base takes images and has no processor, or it cannot be loaded here.
    """
    folder = Path(name).expanduser()
    folder = folder.parent if folder.is_file() else folder
    places = (folder, folder / "actor") if folder.is_dir() else ()
    found = next((place for place in places if any((place / file).is_file() for file in PROCESSOR_FILES)), None)
    if found is not None:
        return load_processor(str(found))
    return load_processor(base) if takes_images(base) else None


def scope_of(model: ModelSection, target_scope: str | None) -> str | None:
    """Where adapters go: of a vision-language model, into its language model, unless another part was named."""
    if target_scope is None and takes_images(model.name, trust_remote_code=model.trust_remote_code):
        return "language_model"
    return target_scope
