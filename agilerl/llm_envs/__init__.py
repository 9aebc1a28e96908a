"""Environments of the fine-tuning algorithms: where batches come from."""

from __future__ import annotations

from agilerl.llm_envs.dataset_env import DatasetEnv
from agilerl.llm_envs.feed import Feed
from agilerl.llm_envs.make import make_env

__all__ = ["DatasetEnv", "Feed", "make_env"]
