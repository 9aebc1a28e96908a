"""Rows to examples to batches; knows no model and no agent."""

from __future__ import annotations
