"""What all sections of a run description have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """A strict, frozen group of settings: unknown keys, NaN and infinity are refused; docstrings of fields are docs."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
    )

    other_names: ClassVar[dict[str, str]] = {}
    """Names that people know from elsewhere -> the field that does it; used in suggestions, never accepted."""

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as plain data."""
        return self.model_dump(mode="json", exclude_defaults=True)
