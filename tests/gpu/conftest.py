"""One table at the end: each path, whether it holds, and its time."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print path, result and seconds of every test in this folder."""
    stats = terminalreporter.stats
    rows = [
        (
            report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " "),
            word,
            getattr(report, "duration", 0.0),
        )
        for word in ("passed", "failed", "error", "skipped")
        for report in stats.get(word, [])
        if "tests/gpu/" in report.nodeid
    ]
    if not rows:
        return
    width = max(len(name) for name, _, _ in rows)
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{'path':<{width}}  result   seconds")
    for name, word, seconds in rows:
        terminalreporter.write_line(f"{name:<{width}}  {word:<7} {seconds:>8.1f}")
