"""Is this the base model that the adapters were trained on?"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["base_fingerprint", "same_base"]

VERSION = "1"
SAMPLES = 64
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save|trainable_tokens_[a-z_]+|token_adapter)\.")
_SPLITTING = ("pissa", "olora", "corda", "loftq")
_WRAPPER = re.compile(r"\.(base_layer|original_module)(?=\.)")


def base_fingerprint(model: nn.Module) -> str:
    """Return a short text that identifies a base model; cheap, and blind to adapters, device and float type.

    A few values of every tensor are rounded to bfloat16 and hashed together with the tensors' names and shapes, so that
    a base loaded in float32 and in bfloat16 gives the same text. Matrices have a part of their own because a quantised
    base does not hold them any more: it is compared by embeddings, norms and biases alone.

    Take it before anything trains or shards the base. Under an adapter whose start has moved a part of the base into
    itself (PiSSA), the matrices are no longer the base's own: it is then compared without them, too.
    """
    common, matrices = hashlib.sha256(), hashlib.sha256()
    quantised = False
    seen: set[int] = set()
    picked: list[tuple[str, Tensor]] = []
    # Tied weights count once: as the embedding.
    for name, tensor in sorted(_base_tensors(model), key=lambda pair: (not _is_embedding(pair[0]), pair[0])):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        # bitsandbytes may store packed 4-bit values in tensors that call themselves bfloat16.
        if not tensor.is_floating_point() or type(tensor).__name__ in ("Params4bit", "Int8Params"):
            quantised = True
        elif tensor.numel() > 0:
            picked.append((name, tensor))
    for (name, tensor), values in zip(picked, _samples([tensor for _, tensor in picked]), strict=True):
        text = f"{name}{list(tensor.shape)}".encode()
        part = common if tensor.dim() < 2 or _is_embedding(name) else matrices
        part.update(text)
        part.update(values)
    others = "quantised" if quantised else "split" if _is_split(model) else matrices.hexdigest()[:24]
    return f"{VERSION}:{common.hexdigest()[:24]}:{others}"


def _is_split(model: nn.Module) -> bool:
    """Whether an adapter's start changed the weights under it."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    starts = [getattr(config, "init_lora_weights", True) for config in configs.values()]
    return any(isinstance(start, str) and start.startswith(_SPLITTING) for start in starts)


def _is_embedding(name: str) -> bool:
    return "embed" in name or "wte" in name


def _base_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name in the plain model, tensor) of every parameter that does not belong to an adapter."""
    found = []
    for raw, tensor in model.named_parameters(remove_duplicate=False):
        if _ADAPTER.search(f".{raw}."):
            continue
        name = _WRAPPER.sub("", f".{raw}")[1:]
        found.append((name.removeprefix("base_model.model."), tensor))
    return found


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> list[bytes]:
    """Evenly spread values of every tensor; one transfer for all of them."""
    rows = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        index = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64).long()
        rows.append(flat[index.to(flat.device)].to(torch.bfloat16).to(tensors[0].device))
    if not rows:
        return []
    return [row.numpy().tobytes() for row in torch.stack(rows).cpu().view(torch.int16)]


def same_base(one: str | None, other: str | None) -> bool | None:
    """Compare two fingerprints; None when either is missing or of another version."""
    if not one or not other:
        return None
    first, second = one.split(":"), other.split(":")
    if len(first) != 3 or len(second) != 3 or first[0] != VERSION or second[0] != VERSION:
        return None
    if first[1] != second[1]:
        return False
    return not {"quantised", "split"}.isdisjoint((first[2], second[2])) or first[2] == second[2]
