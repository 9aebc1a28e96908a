"""A second model on the same frozen tensors: what makes a population cost little more than one member."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from agilerl.models.quantization import protect_quantized_layers, quantized_layers

__all__ = ["share_base"]


def share_base(model: nn.Module) -> nn.Module:
    """Copy a model, sharing every frozen parameter, buffer and quantisation state with the original.

    Trainable parameters are copied without their gradients, so each copy trains alone. For full fine-tuning nothing is
    frozen and the copy is a complete one.
    """
    protect_quantized_layers(model)
    memo: dict[int, Any] = {}
    grads = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        if not parameter.requires_grad:
            memo[id(parameter)] = parameter
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    for _, module in quantized_layers(model):
        # Both the parameter and the module hold the state; a copy of either would dequantise with other tables.
        for holder in (module, module.weight):
            state = getattr(holder, "quant_state", None) or getattr(holder, "state", None)
            if state is not None:
                memo[id(state)] = state
    try:
        for parameter, _ in grads:
            parameter.grad = None
        return copy.deepcopy(model, memo)
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
