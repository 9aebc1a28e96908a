"""Padding-free micro-batches: the place to import them from.

    rows -> Sample -> Packer.plan -> Packer.collate -> MicroBatch -> Packer.running -> hidden states

The values are in `microbatch`, the three paths in `packing`, the attention that keeps samples apart in `attention`, and
the checks that choose a path for a model in `probe`.
"""

from __future__ import annotations

from agilerl.models.microbatch import MicroBatch, Sample
from agilerl.models.packing import Packer, PackingPath
from agilerl.models.probe import choose_packer

__all__ = ["MicroBatch", "Packer", "PackingPath", "Sample", "choose_packer"]
