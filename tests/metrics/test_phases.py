from __future__ import annotations

import time

import pytest

from agilerl.metrics import LEARN_PHASES, PhaseTimer


def test_phases_and_the_rest_add_up_to_the_wall_time():
    begin = time.perf_counter()
    timer = PhaseTimer()
    with timer.phase("forward"):
        time.sleep(0.02)
    time.sleep(0.01)
    seconds = timer.seconds()
    wall = time.perf_counter() - begin
    assert list(seconds) == [f"learn_phase_{name}_s" for name in LEARN_PHASES]
    assert seconds["learn_phase_forward_s"] >= 0.02
    assert seconds["learn_phase_other_s"] >= 0.01
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.005)


def test_nested_time_belongs_to_the_innermost_phase():
    timer = PhaseTimer()
    with timer.phase("backward"):
        with timer.phase("grad_sync"):
            time.sleep(0.02)
        time.sleep(0.005)
    seconds = timer.seconds()
    assert seconds["learn_phase_grad_sync_s"] >= 0.02
    assert 0.005 <= seconds["learn_phase_backward_s"] < 0.02


def test_a_phase_ends_when_its_block_raises():
    timer = PhaseTimer()
    with pytest.raises(RuntimeError), timer.phase("optim"):
        raise RuntimeError
    time.sleep(0.01)
    assert timer.seconds()["learn_phase_optim_s"] < 0.01


def test_unknown_phases_are_refused():
    with pytest.raises(ValueError, match="the phases are prepare, forward"), PhaseTimer().phase("sleep"):
        pass


@pytest.mark.gpu
def test_cuda_phases_measure_the_kernels():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    matrix = torch.randn(4096, 4096, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    timer = PhaseTimer("cuda")
    with timer.phase("forward"):
        for _ in range(20):
            matrix @ matrix
    assert timer.seconds()["learn_phase_forward_s"] > 0.001
