"""Names to models and tokenizers: presets, local folders, names on the Hub."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from agilerl.errors import ModelError
from agilerl.models import presets
from agilerl.models.embeddings import resize_embeddings
from agilerl.models.hub import hub_arguments
from agilerl.models.quantization import keep_head_unquantized, protect_quantized_layers, require_bitsandbytes

_FAILURES = (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError)
"""What transformers raises for names, files and arguments that it cannot use."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""A processor is saved in one of them."""

__all__ = ["PROCESSOR_FILES", "load_base_model", "load_processor", "load_tokenizer", "resolve_name", "takes_images"]


def load_base_model(
    name: str,
    *,
    model_config: dict[str, Any] | None = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Load a causal LM, or a vision-language model, by preset, folder or Hub name.

    Args:
        name: ``"smollm2-135m"`` and other presets, a local folder, or a name on the Hub.
        model_config: Further keyword arguments of ``from_pretrained``; code that comes with a model runs only if
            ``trust_remote_code=True`` is among them. ``embedding_rows`` grows the embedding for added tokens.
        quantization_config: ``BitsAndBytesConfig``; not changed. The head stays unquantised.
        dtype: Type of the weights; None takes what the model was stored in.

    Raises:
        ModelError: The model cannot be found or is not one that this package can load.
    """
    path = resolve_name(name)
    kwargs: dict[str, Any] = {"trust_remote_code": False, **(model_config or {})}
    rows = kwargs.pop("embedding_rows", None)
    if "torch_dtype" in kwargs:
        kwargs["dtype"] = kwargs.pop("torch_dtype")
    kwargs.setdefault("dtype", "auto" if dtype is None else dtype)
    kwargs["dtype"] = _dtype(kwargs["dtype"])
    quantization_config = kwargs.pop("quantization_config", None) or quantization_config
    if quantization_config is not None:
        require_bitsandbytes()
        kwargs["quantization_config"] = keep_head_unquantized(quantization_config, ["lm_head"])
    if not Path(path).is_dir():
        kwargs = {**(where := hub_arguments()), "adapter_kwargs": where, **kwargs}
    try:
        loaded: Any = _loader(path, kwargs).from_pretrained(path, output_loading_info=True, **kwargs)
    except _FAILURES as error:
        raise ModelError(_loading_problem("model", name, path, error)) from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{name} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}.")
    if rows is not None:
        resize_embeddings(model, rows)
    protect_quantized_layers(model)
    return model


_LOOK_UP = ("trust_remote_code", "revision", "code_revision", "cache_dir", "local_files_only", "token", "subfolder")


def _loader(path: str, kwargs: dict[str, Any]) -> Any:
    """The auto class of what is stored there: a vision-language model keeps its vision tower."""
    config = kwargs.get("config")
    if config is None or isinstance(config, str):
        where = {name: kwargs[name] for name in _LOOK_UP if name in kwargs}
        config = AutoConfig.from_pretrained(config or path, **where)
    return AutoModelForImageTextToText if _is_vision(config) else AutoModelForCausalLM


def _is_vision(config: Any) -> bool:
    """Whether a vision-language model is stored with this configuration."""
    kind = config.model_type
    is_text_only = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(
        kind
    ) not in (config.architectures or ())
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not is_text_only


def takes_images(name: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a preset, folder or Hub name is a vision-language model; read from its settings, without its weights."""
    path = resolve_name(name)
    where = {} if Path(path).is_dir() else hub_arguments()
    try:
        return _is_vision(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where))
    except _FAILURES:
        return False  # whoever loads the model says what is wrong with it


def load_processor(name: str) -> Any:
    """Load the processor of a vision-language model: its tokenizer, and what makes inputs of images.

    Raises:
        ModelError: There is none, or it cannot be loaded here.
    """
    path = resolve_name(name)
    where = {} if Path(path).is_dir() else hub_arguments()
    missing = ModelError(
        f"{name} has no processor for images ({' or '.join(PROCESSOR_FILES)}); save the one of the original model beside it."
    )
    if Path(path).is_dir() and not any((Path(path) / file).is_file() for file in PROCESSOR_FILES):
        raise missing
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False, **where)
    except ImportError as error:
        raise ModelError(
            f"The processor of {name} needs more packages ({_first_line(error)}): pip install 'agilerl[vision]'."
        ) from None
    except _FAILURES as error:
        raise ModelError(_loading_problem("processor", name, path, error)) from None
    if not hasattr(processor, "image_processor"):
        raise missing
    return processor


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a preset, a local folder or a Hub name.

    Raises:
        ModelError: There is none.
    """
    path = resolve_name(name)
    kwargs = {} if Path(path).is_dir() else hub_arguments()
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **kwargs)
    except _FAILURES as error:
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
    if "/" not in name and (near := _near_preset(name, 0.8)):
        raise ModelError(f"There is no model called {name!r}; did you mean the preset {near!r}?")
    if folder.is_absolute() or name.startswith((".", "~")) or folder.is_file():
        what = "is a file, not a folder" if folder.is_file() else "does not exist"
        raise ModelError(f"The model folder {name} {what}.")
    return name


def _dtype(value: Any) -> Any:
    """``"torch.float32"``, as a saved setting spells it, is ``torch.float32``."""
    name = str(value).removeprefix("torch.")
    if name == "auto":
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype={value!r} is not a floating type; use 'auto', 'float32', 'bfloat16' or 'float16'.")
    return found


def _near_preset(name: str, cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name.lower(), presets.preset_names(), n=1, cutoff=cutoff)), None)


def _loading_problem(kind: str, name: str, path: str, error: Exception) -> str:
    """One sentence instead of the three layers that failed."""
    if "trust_remote_code" in str(error):
        return (
            f"{name} comes with code of its own, which is run only on request: if you trust it, set "
            "model_config={'trust_remote_code': True}."
        )
    if Path(path).is_dir():
        return _folder_problem(kind, name, Path(path), error)
    if near := _near_preset(name, 0.6):
        return f"There is no {kind} called {name!r}; did you mean the preset {near!r}?"
    return (
        f"The {kind} {name!r} is neither a preset, a folder here nor reachable on the Hub ({_first_line(error)}); "
        "check the spelling, the network or the access rights."
    )


def _folder_problem(kind: str, name: str, folder: Path, error: Exception) -> str:
    found = ", ".join(sorted(item.name for item in folder.iterdir())[:12]) or "nothing"
    adapter = folder / "adapter_config.json"
    if kind == "model" and not (folder / "config.json").exists():
        if adapter.exists():
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
            return f"The folder {name} holds an adapter of {base!r}, not a whole model; load that base and put it on."
        return f"The folder {name} holds no model: there is no config.json in it (found: {found})."
    return f"The {kind} in {name} cannot be loaded ({_first_line(error)}); found there: {found}."


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
