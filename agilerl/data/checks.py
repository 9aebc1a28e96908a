"""Checks before the first step: each refuses what would waste a run, and can be waived by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agilerl.data.summary import Summary
from agilerl.errors import DataError

__all__ = ["CHECKS", "Finding", "check", "refuse"]

CHECKS = ("nothing_trained", "stop_never_trained", "everything_trained", "all_cut", "overlap", "stop_token")
"""Names of the checks, as they are waived."""


@dataclass(frozen=True)
class Finding:
    """A check that failed."""

    name: str
    sentence: str


def check(
    summary: Summary,
    *,
    is_text: bool,
    stop_ids: Collection[int],
    control_ids: dict[str, int],
    train_hashes: np.ndarray | None = None,
    test_hashes: np.ndarray | None = None,
) -> list[Finding]:
    """What is wrong with a train split as a whole.

    Args:
        summary: Its numbers.
        is_text: Plain text, of which everything is trained on purpose.
        stop_ids: Tokens at which generation stops.
        control_ids: Control tokens by text.
        train_hashes: Content of its rows.
        test_hashes: Content of the held-out rows.
    """
    found: list[Finding] = []
    if not summary.trained_tokens:
        found.append(Finding("nothing_trained", "no token of the train split is trained"))
    if not summary.stop_tokens:
        found.append(
            Finding(
                "stop_never_trained",
                "no row ends in a stop token that is trained, so the model will not learn to stop",
            )
        )
    is_everything = (
        summary.rows
        and summary.trained_tokens >= summary.tokens - summary.rows
        and summary.without_prompt == summary.rows
    )
    if is_everything and not is_text:
        found.append(Finding("everything_trained", "every token is trained, prompts included"))
    if summary.report.cut and summary.report.cut >= summary.report.rows_kept:
        found.append(Finding("all_cut", f"all {summary.report.cut} rows are longer than the limit and were cut"))
    foreign = {text: count for text, count in summary.stop_tokens.items() if control_ids.get(text) not in stop_ids}
    if foreign and stop_ids:
        text, count = max(foreign.items(), key=lambda item: item[1])
        names = {index: name for name, index in control_ids.items()}
        allowed = ", ".join(repr(names.get(index, str(index))) for index in sorted(stop_ids))
        found.append(
            Finding(
                "stop_token",
                f"{count} answers end in {text!r}, but the model stops at {allowed}: template and model disagree",
            )
        )
    if train_hashes is not None and test_hashes is not None and len(test_hashes):
        shared = int(np.isin(test_hashes, train_hashes).sum())
        if shared:
            found.append(Finding("overlap", f"{shared} of {len(test_hashes)} held-out rows are also train rows"))
    return found


def refuse(findings: Sequence[Finding], allow: Iterable[str] = ()) -> list[Finding]:
    """Raise for the findings that are not allowed; the others are given back.

    Raises:
        DataError: Names every finding and how to waive it, or a name that is no check.
    """
    allowed = set(allow)
    unknown = sorted(allowed - set(CHECKS))
    if unknown:
        raise DataError(f"data.allow names {', '.join(map(repr, unknown))}; the checks are {', '.join(CHECKS)}.")
    refused = [finding for finding in findings if finding.name not in allowed]
    if refused:
        sentences = "; ".join(f"{finding.sentence} ({finding.name})" for finding in refused)
        names = ", ".join(finding.name for finding in refused)
        raise DataError(f"The data is not fit to train on: {sentences}. Mend it, or go on with data.allow=[{names}].")
    return list(findings)
