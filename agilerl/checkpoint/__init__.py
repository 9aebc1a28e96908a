"""Checkpoints: plain values in, atomic files out, and back again without running anything that a file brings."""

from __future__ import annotations

from agilerl.checkpoint.background import BackgroundWriter
from agilerl.checkpoint.complete import Problem, newest_complete
from agilerl.checkpoint.content import AdapterContent, CheckpointContent, FullModel
from agilerl.checkpoint.fingerprint import base_fingerprint, same_base
from agilerl.checkpoint.folder import CheckpointFolder, check_writable, existing_checkpoint
from agilerl.checkpoint.plain import json_safe, plain
from agilerl.checkpoint.read import read_adapter, read_checkpoint
from agilerl.checkpoint.snapshot import HostBuffers, LLMCheckpointSnapshot
from agilerl.checkpoint.tokenizer import tokenizer_difference
from agilerl.checkpoint.verify import VerifyReport, verify
from agilerl.checkpoint.write import write_checkpoint

__all__ = [
    "AdapterContent",
    "BackgroundWriter",
    "CheckpointContent",
    "CheckpointFolder",
    "FullModel",
    "HostBuffers",
    "LLMCheckpointSnapshot",
    "Problem",
    "VerifyReport",
    "base_fingerprint",
    "check_writable",
    "existing_checkpoint",
    "json_safe",
    "newest_complete",
    "plain",
    "read_adapter",
    "read_checkpoint",
    "same_base",
    "tokenizer_difference",
    "verify",
    "write_checkpoint",
]
