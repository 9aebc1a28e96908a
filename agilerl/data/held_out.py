"""A held-out share, chosen by content: duplicates never straddle it, and every rank chooses the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agilerl.data.order import mix
from agilerl.errors import DataError

__all__ = ["split_by_content"]

_SALT = np.uint64(0x5EED_0F_0DD_E7E27)


def split_by_content(
    hashes: NDArray[np.uint64], records: NDArray[np.int64], share: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the train rows and of the held-out rows.

    The distinct contents with the smallest hashes are held out: about ``share`` of them, at least one where there are two
    or more. Rows of one record stay together, so do rows of equal content.

    Args:
        hashes: Hash of each row's content, [rows].
        records: Record that each row came from, [rows], ascending.
        share: Between 0 and 1.
    """
    if not 0 <= share < 1:
        raise DataError(f"test_share is {share}; it must be at least 0 and less than 1.")
    numbers = np.arange(len(hashes), dtype=np.int64)
    with np.errstate(over="ignore"):
        keys = mix(hashes ^ _SALT)
    first_of_record = np.concatenate([[True], records[1:] != records[:-1]]) if len(records) else np.zeros(0, bool)
    group = keys[first_of_record][np.cumsum(first_of_record) - 1] if len(keys) else keys
    distinct = np.unique(group)
    count = min(max(1, round(share * len(distinct))), len(distinct) - 1) if share > 0 and len(distinct) > 1 else 0
    if not count:
        return numbers, numbers[:0]
    held = group <= distinct[count - 1]
    # A content that several records share in part goes with its held-out occurrence.
    held |= np.isin(keys, keys[held])
    if held.all():
        held = group <= distinct[count - 1]
    return numbers[~held], numbers[held]
