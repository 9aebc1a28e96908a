from __future__ import annotations

import sys
import types

import pytest

from agilerl.errors import MissingExtraError
from agilerl.metrics import MetricsLog
from agilerl.metrics.sinks import TensorBoardSink, WandbSink, trackers

RECORD = {"kind": "train", "rows": 8, "loss": 0.5, "agent": 0, "message": "text is no scalar"}


class FakeRun:
    def __init__(self):
        self.logged, self.metrics, self.finished = [], [], False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.calls = []
    module.run = FakeRun()
    module.login = lambda **kwargs: module.calls.append(("login", kwargs))

    def init(**kwargs):
        module.calls.append(("init", kwargs))
        return module.run

    module.init = init
    monkeypatch.setattr(trackers, "require", lambda *_: module)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_without_a_key_wandb_is_offline_and_never_logs_in(wandb):
    WandbSink(config={"lr": 1}, project="p")
    assert wandb.calls == [("init", {"config": {"lr": 1}, "project": "p", "mode": "offline"})]


def test_a_key_or_an_explicit_mode_decides(wandb, monkeypatch):
    WandbSink(api_key="k")
    WandbSink(mode="disabled")
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbSink(api_key="k")
    assert [call[0] for call in wandb.calls] == ["login", "init", "init", "init"]
    assert [call[1]["mode"] for call in wandb.calls if call[0] == "init"] == ["online", "disabled", "offline"]


def test_rows_are_the_step_axis_so_no_point_is_dropped(wandb):
    sink = WandbSink()
    sink.write(RECORD)
    sink.write({**RECORD, "agent": 2})
    sink.close()
    assert wandb.run.logged == [{"train/loss": 0.5, "rows": 8}, {"train/agent-2/loss": 0.5, "rows": 8}]
    assert ("*", "rows") in wandb.run.metrics
    assert wandb.run.finished


def test_a_tracker_that_raises_never_stops_the_run(wandb):
    def fail(values):
        raise RuntimeError("quota")

    wandb.run.log = fail
    log = MetricsLog([WandbSink()])
    with pytest.warns(RuntimeWarning, match="WandbSink failed and is switched off"):
        log.log(RECORD)
    log.log(RECORD)


def test_missing_trackers_name_the_extra(monkeypatch):
    monkeypatch.setattr("agilerl.optional.has", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agilerl\[wandb\]'"):
        WandbSink()
    with pytest.raises(MissingExtraError, match=r"pip install 'agilerl\[tensorboard\]'"):
        TensorBoardSink("x")


def test_nothing_imports_a_tracker_that_was_not_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("agilerl.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing them would raise
    import agilerl.metrics.sinks  # noqa: F401


def test_tensorboard_writes_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(RECORD)
    sink.write({**RECORD, "kind": "eval", "rows": 16})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(8, 0.5)]
    assert [event.step for event in events.Scalars("eval/loss")] == [16]
