"""Prepared splits on disk, found again by everything that decides them."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agilerl.cache import cache_folder, locked
from agilerl.data.encoder import TextEncoder
from agilerl.data.prepare import Prepared
from agilerl.data.report import Report
from agilerl.data.store import Store

__all__ = ["cache_key", "prepared_in_cache"]

logger = logging.getLogger(__name__)

# Raised whenever the same rows and settings would give other tokens than before.
_VERSION = 2
_META = "meta.json"


def cache_key(source: str, encoder: TextEncoder, settings: Any) -> str:
    """A name for the result of preparing ``source`` (its identity) with a tokenizer under ``settings`` (plain values)."""
    digest = hashlib.blake2b(digest_size=20)
    for part in (str(_VERSION), source, encoder.identity, json.dumps(settings, sort_keys=True, default=str)):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def prepared_in_cache(key: str, build: Callable[[Path], Prepared]) -> Prepared:
    """The prepared split under ``key``: opened, or built once by whichever process comes first.

    Args:
        key: From :func:`cache_key`.
        build: Prepares the split into the folder it is given.
    """
    folder = cache_folder() / "data"
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / key
    with locked(folder / f"{key}.lock"):
        if not (final / _META).is_file():
            shutil.rmtree(final, ignore_errors=True)
            making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
            try:
                prepared = build(making)
                meta = {
                    "report": prepared.report.as_dict(),
                    "stores": [
                        [path.name if path != making else "", store.fingerprint]
                        for path, store in zip(_folders(making, prepared), prepared.stores, strict=True)
                    ],
                }
                (making / _META).write_text(json.dumps(meta), encoding="utf-8")
                making.rename(final)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
        else:
            logger.info("data: tokenised before, read from %s", final)
    meta = json.loads((final / _META).read_text(encoding="utf-8"))
    stores = tuple(Store.open(final / name, fingerprint) for name, fingerprint in meta["stores"])
    return Prepared(stores, Report.from_dict(meta["report"]))


def _folders(folder: Path, prepared: Prepared) -> list[Path]:
    return [folder] if len(prepared.stores) == 1 else [folder / "chosen", folder / "rejected"]
