"""Signals are noted while training, stop at once before it, and quit when they come twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agilerl.training.llm.signals import Interrupted, Terminated, stop_signals

KINDS = [(signal.SIGINT, Interrupted, 130), (signal.SIGTERM, Terminated, 143)]


@pytest.mark.parametrize(("number", "kind", "code"), KINDS)
def test_training_decides_when_to_stop(number: signal.Signals, kind: type, code: int) -> None:
    seen = []

    def train() -> None:
        with stop_signals() as stop:
            seen.append(stop.requested)
            os.kill(os.getpid(), number)
            seen.append(stop.requested)
            stop.path = Path("out")
            stop.finish()

    with pytest.raises(kind) as caught:
        train()
    assert seen == [None, caught.value.signal]
    assert caught.value.exit_code == code
    assert caught.value.path == Path("out")
    assert "saved to out" in str(caught.value)


@pytest.mark.parametrize(("number", "kind", "code"), KINDS)
def test_preparation_stops_at_once(number: signal.Signals, kind: type, code: int) -> None:
    seen = []

    def prepare() -> None:
        with stop_signals(defer=False):
            os.kill(os.getpid(), number)
            seen.append("went on")

    with pytest.raises(kind) as caught:
        prepare()
    assert seen == []
    assert "nothing to save" in str(caught.value)
    assert caught.value.exit_code == code


def test_an_inner_block_defers_and_its_end_stops() -> None:
    seen = []

    def command() -> None:
        with stop_signals(defer=False) as outer:
            with stop_signals() as inner:
                assert inner is outer
                os.kill(os.getpid(), signal.SIGINT)
                seen.append("went on")
            seen.append("not reached")

    with pytest.raises(Interrupted):
        command()
    assert seen == ["went on"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_watch_nothing() -> None:
    seen = []

    def work() -> None:
        with stop_signals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 131), ("SIGTERM", 144)])
def test_the_second_signal_quits_at_once(number: str, code: int) -> None:
    script = f"""
import os, signal
from agilerl.training.llm.signals import stop_signals
with stop_signals():
    for _ in range(2):
        os.kill(os.getpid(), signal.{number})
    print("not reached", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "not reached" not in done.stdout


def test_sigterm_gives_its_exit_code_to_a_plain_script() -> None:
    script = """
import os, signal
from agilerl.training.llm.signals import stop_signals
with stop_signals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    stop.finish()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 143
