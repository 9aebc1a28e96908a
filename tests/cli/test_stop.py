"""A signal before training has begun: nothing is lost, so the command stops at once."""

from __future__ import annotations

import os
import signal

import pytest


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("phase", ["load_tokenizer_for", "build_env", "build_agents"])
def test_a_signal_while_preparing_stops_at_once(sft, tmp_path, monkeypatch, phase, number, exit_code):
    def signalled(*args, **kwargs):
        os.kill(os.getpid(), number)
        pytest.fail("the command went on")

    monkeypatch.setattr(f"agilerl.recipes.run.{phase}", signalled)
    code, _, err = sft()
    assert code == exit_code
    assert "there was nothing to save yet" in err
    assert not (tmp_path / "out" / "attributes.pt").exists()
