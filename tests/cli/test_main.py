from __future__ import annotations

import subprocess
import sys
import time

import pytest

from agilerl.cli import COMMANDS, main


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; from agilerl.cli import main; main(['--help']); "
        "sys.stderr.write(' '.join(m for m in ('torch', 'transformers', 'typer', 'pydantic', 'rich') if m in sys.modules))"
    )
    begin = time.perf_counter()
    result = python(code)
    assert time.perf_counter() - begin < 1.0
    assert result.stderr == ""
    assert all(f"  {name}" in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_file_and_helps_without_torch(name):
    code = (
        f"import sys; from agilerl.cli import main; code = main(['{name}', '--help']); "
        "sys.stderr.write('torch' if 'torch' in sys.modules else ''); sys.exit(code)"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"agilerl {name}" in result.stdout


def test_a_wrong_setting_is_told_before_torch_is_imported():
    code = (
        "import sys; from agilerl.cli import main; code = main(['sft', 'sft.learning_rat=1']); "
        "sys.stderr.write('torch' if 'torch' in sys.modules else ''); sys.exit(code)"
    )
    result = python(code)
    assert result.returncode == 2
    assert result.stderr == (
        "Error: One problem: command line: there is no setting sft.learning_rat; did you mean sft.lr?\n"
    )


def test_module_and_version():
    result = subprocess.run([sys.executable, "-m", "agilerl", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("agilerl 0.")


def test_unknown_commands_name_the_nearest(agilerl):
    code, out, err = agilerl("stf")
    assert (code, out) == (2, "")
    assert "Did you mean 'sft'?" in err


@pytest.mark.parametrize("words", [["sft", "--modle", "x"], ["chat"], ["chat", "x", "--max-new-tokens", "zero"]])
def test_wrong_options_exit_with_2(agilerl, words):
    code, _, err = agilerl(*words)
    assert code == 2
    assert "Traceback" not in err


def test_ctrl_c_outside_of_training_exits_with_130(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("agilerl.cli._find", interrupted)
    assert main(["sft"]) == 130
    assert "Traceback" not in capsys.readouterr().err
