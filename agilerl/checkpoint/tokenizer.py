"""The tokenizer and its chat template, as files in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agilerl.data.images import tokenizer_of

__all__ = ["TokenizerFiles", "read_tokenizer", "tokenizer_difference", "tokenizer_files"]

MARKER = "tokenizer_config.json"
# Rendering a large vocabulary takes a while, and must not happen in a writer thread while training encodes text.
_rendered: WeakKeyDictionary[Any, tuple[Any, TokenizerFiles]] = WeakKeyDictionary()


class TokenizerFiles(dict[str, bytes]):
    """Relative file name -> bytes of a saved tokenizer."""


def tokenizer_files(tokenizer: Any) -> TokenizerFiles:
    """Render a tokenizer to the files that ``save_pretrained`` writes; kept until the tokenizer visibly changes.

    A processor of a vision-language model stands for its tokenizer, and its own files are among them.
    """
    if isinstance(tokenizer, TokenizerFiles):
        return tokenizer
    words = tokenizer_of(tokenizer)
    version = (
        len(words),
        str(getattr(tokenizer, "chat_template", None)),
        str(words.special_tokens_map),
        words.padding_side,
    )
    known = _rendered.get(tokenizer)
    if known is not None and known[0] == version:
        return known[1]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        files = TokenizerFiles({p.relative_to(root).as_posix(): p.read_bytes() for p in _files(root)})
    _rendered[tokenizer] = (version, files)
    return files


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def tokenizer_difference(saved: Any, here: Any) -> str | None:
    """Say how two tokenizers differ in the ids that they give; None where they do not (templates may)."""
    saved, here = tokenizer_of(saved), tokenizer_of(here)
    theirs, ours = saved.get_vocab(), here.get_vocab()
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} entries there and {len(ours)} here"
    for token in sorted(theirs, key=theirs.__getitem__):
        if ours.get(token) != theirs[token]:
            return f"{token!r} is id {theirs[token]} there and {ours.get(token)} here"
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(saved, name) != getattr(here, name):
            return f"{name} is {getattr(saved, name)} there and {getattr(here, name)} here"
    return None


def read_tokenizer(folder: Path) -> Any:
    """Load the tokenizer, or the processor, of a checkpoint; None where it has none. No network, no remote code."""
    if not (folder / MARKER).exists():
        return None
    from transformers import AutoProcessor, AutoTokenizer

    from agilerl.models.build import PROCESSOR_FILES

    kind = AutoProcessor if any((folder / name).exists() for name in PROCESSOR_FILES) else AutoTokenizer
    return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
