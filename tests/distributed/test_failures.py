"""When one rank fails, the others end within seconds and say why."""

from __future__ import annotations

import time

import pytest

from tests.distributed.launch import finish, start

CAUSES = {
    "raise": "rank 1 failed: ValueError: row 7 is bad",
    "kill": "rank 1 failed: its process ended without a message",
    "exit": "rank 1 left the group while this rank still had work",
    "stuck": "rank 1 failed: ValueError: row 7 is bad",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how == "kill" else pytest.mark.slow) for how in CAUSES])
def test_a_failing_rank_ends_all(how: str) -> None:
    processes = start(2, ["-m", "tests.distributed.failing", how])
    if how == "kill":  # measured from the moment that the rank is dead
        processes[1].wait(timeout=150)
        began = time.monotonic()
        processes[0].wait(timeout=60)
        assert time.monotonic() - began < 30
    results = finish(processes, timeout=150)
    code, output = results[0]
    assert code != 0
    assert CAUSES[how] in output
