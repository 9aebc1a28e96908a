"""Errors a user can meet. Each is also the builtin exception that it refines, so plain ``except ValueError`` works."""

from __future__ import annotations

__all__ = [
    "AgileRLError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "OutputError",
    "UnsupportedError",
]


class AgileRLError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(AgileRLError, ValueError):
    """A setting has a value that cannot be used."""


class DataError(AgileRLError, ValueError):
    """A file, split, row or column cannot be used as training data."""


class ModelError(AgileRLError, ValueError):
    """A model, adapter or tokenizer cannot be found or does not fit what was asked of it."""


class CheckpointError(AgileRLError, ValueError):
    """A checkpoint is incomplete, damaged or belongs to something else."""


class NonFiniteError(AgileRLError, ValueError):
    """A loss or gradient is NaN or infinite; no weight has been changed."""


class DistributedError(AgileRLError, RuntimeError):
    """Another rank failed, or the process group cannot be used."""


class OutputError(AgileRLError, OSError):
    """A folder or file cannot be written."""


class MissingExtraError(AgileRLError, ImportError):
    """An optional package is needed; the message holds the install command."""


class UnsupportedError(AgileRLError, NotImplementedError):
    """A documented setting that this version, machine or model cannot honour."""
