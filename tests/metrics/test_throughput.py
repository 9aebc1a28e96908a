from __future__ import annotations

import time

import pytest

from agilerl.metrics import Throughput, peak_memory_gib
from agilerl.metrics.throughput import resident_memory_gib


def test_speed_is_tokens_over_time():
    speed = Throughput()
    assert speed.rates() == {"tokens_per_s": None, "real_tokens_per_s": None}
    begin = time.perf_counter()
    time.sleep(0.05)
    speed.update(100, 400)
    rates = speed.rates()
    assert rates["tokens_per_s"] == pytest.approx(100 / (time.perf_counter() - begin), rel=0.2)
    assert rates["real_tokens_per_s"] == pytest.approx(4 * rates["tokens_per_s"])


def test_a_pause_does_not_count():
    speed = Throughput()
    time.sleep(0.01)
    speed.update(100)
    before = speed.rates()["tokens_per_s"]
    time.sleep(0.1)
    speed.pause()
    time.sleep(0.01)
    speed.update(100)
    assert speed.rates()["tokens_per_s"] == pytest.approx(before, rel=0.5)


def test_peak_memory_is_at_least_what_is_resident():
    resident, peak = resident_memory_gib(), peak_memory_gib()
    assert resident is not None
    assert peak is not None
    assert 0.01 < resident <= peak * 1.01
