"""Optional packages: asked for at first use, with the install command in the error."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from agilerl.errors import MissingExtraError

__all__ = ["has", "require"]


def has(package: str) -> bool:
    """Whether ``package`` is installed; looks without importing it."""
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Import ``package`` or say how to install it.

    Args:
        package: Import name, such as ``"bitsandbytes"``.
        extra: Name of the extra of this project that brings it.
        purpose: What needs it, as the start of a sentence ("4-bit loading").

    Raises:
        MissingExtraError: The package is not installed.
    """
    if not has(package):
        raise MissingExtraError(
            f"{purpose} needs the package '{package.partition('.')[0]}': pip install 'agilerl[{extra}]'"
        )
    return importlib.import_module(package)
