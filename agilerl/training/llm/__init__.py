"""Training of language models on a dataset: one loop, its parts in small files.

Read ``loop``; ``options`` checks arguments, ``budget`` says how long, ``feeding`` gives rows, ``trainee`` is one agent in
training, ``evaluation`` measures, ``evolution`` and ``lineage`` make generations, ``checkpointing`` saves, ``run``
holds what moves and goes on from a checkpoint, ``logs`` opens the places that records go to, ``setup`` joins the parts.
"""

from agilerl.training.llm.lineage import lineage_table, read_lineage, winning_settings
from agilerl.training.llm.loop import train_llm_dataset

__all__ = ["lineage_table", "read_lineage", "train_llm_dataset", "winning_settings"]
