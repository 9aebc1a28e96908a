"""Saving an agent."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["save_llm_checkpoint"]


def save_llm_checkpoint(agent: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Save adapters, state and moments of an agent to a folder that ``PeftModel.from_pretrained`` reads.

    Args:
        agent: A language-model agent.
        path: Folder; None means ``./saved_checkpoints``.
    """
    agent.save_checkpoint("saved_checkpoints" if path is None else path)
