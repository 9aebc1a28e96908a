"""From rows to micro-batches that waste nothing, by one of three paths that give the same result.

* ``packed``: real tokens only, one row ``[1, T]``, attention per sample (`agilerl.models.attention`).
* ``native``: the same row through the model's own attention, which keeps samples apart by their restarting positions.
* ``padded``: rows of similar length padded on the right to a rectangle ``[B, L]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agilerl.errors import ConfigError, DataError
from agilerl.models.attention import Segments, attend
from agilerl.models.extras import PLAIN_INPUTS, join_extras
from agilerl.models.forms import fast_forms
from agilerl.models.microbatch import MicroBatch, Sample, deal_to_lanes, plan_packed, plan_padded

__all__ = ["Packer", "PackingPath", "attention_configs", "text_model"]

PackingPath = Literal["packed", "native", "padded"]

# The longest lane may take so many times its fair share. Beyond, all threads on one micro-batch after the other are faster.
_UNEVEN = 1.1


def text_model(model: Any) -> Any:
    """Return the transformers model inside adapters and other wrappers."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def attention_configs(model: nn.Module) -> list[Any]:
    """Return the distinct configuration objects that tell the language model's modules which attention to compute.

    Other towers of a multimodal model have configurations of another type and keep their own attention.
    """
    kind = type(text_model(model).config.get_text_config())
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is kind:
            found.setdefault(id(config), config)
    return list(found.values())


@contextmanager
def _running_packed(configs: list[Any], micro: MicroBatch) -> Iterator[Segments]:
    with fast_forms(), attend(configs, micro.lengths, micro.branches) as segments:
        yield segments


@dataclass(frozen=True)
class Packer:
    """Plans, builds and runs the micro-batches of one kind of model. Holds no model and can be shared by clones.

    Attributes:
        path: How tokens reach the model.
        reason: Why this path and no faster one, in words for a person.
        token_budget: Cells per micro-batch where no number of rows is set: a function of the model and its settings.
        weight_dtype: Dtype of the weights of targets.
        with_positions: Whether the model is handed ``position_ids``.
        masks_padding: Whether padding is masked. It need not be where nothing looks ahead: real tokens come first.
        num_lanes: Micro-batches that may be computed side by side (`agilerl.lanes`); see `choose_lanes`.
    """

    path: PackingPath
    reason: str
    token_budget: int
    weight_dtype: torch.dtype = torch.float32
    with_positions: bool = True
    masks_padding: bool = True
    num_lanes: int = 1

    def plan(self, lengths: Sequence[int], max_rows: int | None, token_budget: int | None = None) -> list[list[int]]:
        """Share rows out among micro-batches.

        Args:
            lengths: Real tokens of each row.
            max_rows: Most rows in a micro-batch; None leaves it to the token budget.
            token_budget: Most cells in a micro-batch. None means the packer's own where `max_rows` is None as well,
                and no limit otherwise.

        Returns:
            Row indices of each micro-batch; every row once, a pure function of the arguments.
        """
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"The micro-batch size is {max_rows}; it must be at least 1.")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"The token budget is {token_budget}; it must be at least 1.")
        if token_budget is None and max_rows is None:
            token_budget = self.token_budget
        plan = plan_padded if self.path == "padded" else plan_packed
        return plan(lengths, max_rows, token_budget)

    def plan_lanes(
        self, lengths: Sequence[int], max_rows: int | None
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """Share rows out among smaller micro-batches that are computed side by side, together within the same limits.

        Args:
            lengths: Real tokens of each row.
            max_rows: As for `plan`.

        Returns:
            Row indices of each micro-batch and, by lane, the numbers of those that it computes one after the other; None
            where there is nothing to gain: one lane, too few rows, or rows too unlike.
        """
        n = self.num_lanes
        rows = None if max_rows is None else max_rows // n
        budget = self.token_budget // n if max_rows is None else None
        if n == 1 or len(lengths) < n or rows == 0 or (budget is not None and max(lengths) > budget):
            return None
        micros = plan_packed(lengths, rows, budget, multiple=n)
        loads = [sum(lengths[i] for i in rows) for rows in micros]
        lanes = deal_to_lanes(loads, n)
        longest = max(sum(loads[number] for number in lane) for lane in lanes)
        return (micros, lanes) if longest * n <= _UNEVEN * sum(loads) else None

    def collate(self, samples: Sequence[Sample], device: torch.device | str) -> MicroBatch:
        """Build one micro-batch on `device`; no samples give a valid one whose weight is zero."""
        for index, sample in enumerate(samples):
            if sample.ids.ndim != 1 or sample.ids.shape != sample.weights.shape or len(sample.ids) == 0:
                raise DataError(
                    f"Sample {index} has ids of shape {tuple(sample.ids.shape)} and weights of shape "
                    f"{tuple(sample.weights.shape)}; both must be [l] with l >= 1."
                )
        if not samples:
            # One token that predicts nothing: every rank runs the same collectives, with gradients of zero.
            token = Sample(torch.zeros(1, dtype=torch.long), torch.zeros(1))
            return self._collate([token], torch.device(device), num_rows=0)
        return self._collate(list(samples), torch.device(device), num_rows=len(samples))

    def running(self, model: nn.Module, micro: MicroBatch) -> AbstractContextManager[object]:
        """Wrap the forward and the backward pass of `micro`: the model attends within samples meanwhile."""
        if self.path == "packed" and micro.lengths:
            return _running_packed(attention_configs(model), micro)
        return fast_forms()

    def _collate(self, samples: list[Sample], device: torch.device, num_rows: int) -> MicroBatch:
        extras = {name for sample in samples for name in sample.extra or {}}
        if self.path != "padded" and extras - PLAIN_INPUTS:
            # Such inputs come with positions or masks of the model's own making, which a packed row cannot have.
            padded = replace(self, path="padded", with_positions=False, masks_padding=True)
            return padded._collate(samples, device, num_rows)
        lengths = [len(sample.ids) for sample in samples]
        total = sum(lengths)
        width = max(lengths) if self.path == "padded" else 0
        starts = torch.tensor([row * width if width else sum(lengths[:row]) for row in range(len(lengths))])
        sizes = torch.tensor(lengths)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), sizes)  # [T]
        positions = torch.arange(total) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)  # [T]
        cells = starts[rows] + positions  # [T] where each token lies in the flattened input
        ids = torch.cat([sample.ids.cpu() for sample in samples]).long()
        weights = torch.cat([sample.weights.cpu() for sample in samples]).to(self.weight_dtype)
        chosen = torch.nonzero((weights != 0) & (positions > 0)).squeeze(1)  # [N]
        num_cells = len(lengths) * width if width else total
        shape = (len(lengths), width) if width else (1, total)

        def spread(values: Tensor) -> Tensor:
            return torch.zeros(num_cells, dtype=values.dtype).index_copy_(0, cells, values).view(shape)

        inputs = {"input_ids": spread(ids)}
        if width and (self.masks_padding or extras):
            inputs["attention_mask"] = spread(torch.ones(total, dtype=torch.long))
        elif width:
            inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if self.with_positions and (not width or not extras):  # with images, a padded row's positions are the model's
            inputs["position_ids"] = torch.arange(width).expand(shape) if width else positions.view(shape)
        inputs.update(join_extras(samples, lengths, spread))
        return MicroBatch(
            inputs={name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()},
            predict_from=(cells[chosen] - 1).to(device, non_blocking=True),
            targets=ids[chosen].to(device, non_blocking=True),
            weights=weights[chosen].to(device, non_blocking=True),
            rows=rows[chosen].to(device, non_blocking=True),
            num_rows=num_rows,
            num_tokens=total if num_rows else 0,
            num_cells=num_cells,
            lengths=() if width else tuple(lengths),
        )
