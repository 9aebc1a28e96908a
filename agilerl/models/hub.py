"""Whether the Hub can be reached, asked once and briefly instead of through minutes of retries."""

from __future__ import annotations

import logging

from huggingface_hub import constants
from huggingface_hub.utils import get_session

__all__ = ["hub_arguments"]

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 5.0


def hub_arguments() -> dict[str, bool]:
    """Keyword arguments of ``from_pretrained`` for a name on the Hub: its cache alone where the Hub is out of reach."""
    if constants.HF_HUB_OFFLINE:
        return {"local_files_only": True}
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # whatever the HTTP library raises: no network, no name service, a proxy that refuses
        _LOG.info("The Hub cannot be reached (%s); only its local cache is used.", error)
        return {"local_files_only": True}
    return {}
