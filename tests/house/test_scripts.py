"""The scripts are what a newcomer meets first: they parse, are executable, and say what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "scripts" / name for name in ("demo", "test", "check", "test-gpu")] + [ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_an_old_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "demo")], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device, so the tests would run")
@pytest.mark.parametrize(
    ("python", "said"), [(sys.executable, "nothing was tested"), ("/no/such/python", "There is no")]
)
def test_without_a_device_the_gpu_tests_say_so(python: str, said: str) -> None:
    command = [str(ROOT / "scripts" / "test-gpu")]
    done = subprocess.run(command, env={**os.environ, "PYTHON": python}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_constraints_pin_every_direct_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["demo"], *extras["test"], *extras["dev"]}
    names = {name.split(">=")[0].split("[")[0].lower() for name in wanted}
    assert names - {"agilerl"} <= pinned
    assert "torch==2.13.0" in lines


def test_importing_the_package_loads_no_torch_and_is_quick() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); import agilerl; took = time.perf_counter() - start;"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'datasets'} & set(sys.modules);"
        "print(took); sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert min(float(run.stdout) for run in runs) < 0.2
