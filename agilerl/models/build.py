"""Names to models and tokenizers: presets, local folders, names on the Hub."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agilerl.errors import ModelError
from agilerl.models import presets
from agilerl.models.quantization import keep_head_unquantized, protect_quantized_layers, require_bitsandbytes

if TYPE_CHECKING:
    import torch

__all__ = ["load_base_model", "load_tokenizer", "resolve_name"]


def load_base_model(
    name: str,
    *,
    model_config: dict[str, Any] | None = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Load a causal LM by preset, folder or Hub name.

    Args:
        name: ``"smollm2-135m"`` and other presets, a local folder, or a name on the Hub.
        model_config: Further keyword arguments of ``from_pretrained``; code that comes with a model runs only if
            ``trust_remote_code=True`` is among them.
        quantization_config: ``BitsAndBytesConfig``; not changed. The head stays unquantised.
        dtype: Type of the weights; None takes what the model was stored in.

    Raises:
        ModelError: The model cannot be found or is not one that this package can load.
    """
    path = resolve_name(name)
    kwargs: dict[str, Any] = {"trust_remote_code": False, **(model_config or {})}
    if "torch_dtype" in kwargs:
        kwargs["dtype"] = kwargs.pop("torch_dtype")
    kwargs.setdefault("dtype", "auto" if dtype is None else dtype)
    if quantization_config is not None:
        require_bitsandbytes()
        kwargs["quantization_config"] = keep_head_unquantized(quantization_config, ["lm_head"])
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_loading_problem("model", name, path, error)) from None
    protect_quantized_layers(model)
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a preset, a local folder or a Hub name.

    Raises:
        ModelError: There is none.
    """
    path = resolve_name(name)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_loading_problem("tokenizer", name, path, error)) from None


def resolve_name(name: str) -> str:
    """What ``from_pretrained`` is given: a preset's converted folder, or the name itself.

    Raises:
        ModelError: Not a name, or a folder without a model in it.
    """
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ModelError(f"A model name is a preset, a folder or a name on the Hub, not {name!r}.")
    name = str(name)
    if presets.is_preset(name):
        return str(presets.load_preset_folder(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or folder.is_file():
        what = "is a file, not a folder" if folder.is_file() else "does not exist"
        raise ModelError(f"The model folder {name} {what}.")
    return name


def _loading_problem(kind: str, name: str, path: str, error: Exception) -> str:
    """One sentence instead of the three layers that failed."""
    if Path(path).is_dir():
        found = ", ".join(sorted(item.name for item in Path(path).iterdir())[:12]) or "nothing"
        if kind == "model" and not (Path(path) / "config.json").exists():
            return f"The folder {name} holds no model: there is no config.json in it (found: {found})."
        return f"The {kind} in {name} cannot be loaded ({_first_line(error)}); found there: {found}."
    if near := difflib.get_close_matches(name.lower(), presets.preset_names(), n=1, cutoff=0.6):
        return f"There is no {kind} called {name!r}; did you mean the preset {near[0]!r}?"
    return (
        f"The {kind} {name!r} is neither a preset, a folder here nor reachable on the Hub ({_first_line(error)}); "
        "check the spelling, the network or the access rights."
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
