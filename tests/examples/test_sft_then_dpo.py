"""The two-stage example runs as it stands, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.small import surround

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_then_dpo.py"


def test_the_second_stage_starts_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    surround(tmp_path, monkeypatch, "llama")
    names: dict = {"__name__": "__main__"}
    source = EXAMPLE.read_text(encoding="utf-8").replace("max_steps=320", "max_steps=64")
    exec(compile(source, EXAMPLE, "exec"), names)

    first = load_file(tmp_path / "outputs" / "sft-stage" / "actor" / "adapter_model.safetensors")
    reference = load_file(tmp_path / "outputs" / "dpo-stage" / "reference" / "adapter_model.safetensors")
    final = load_file(tmp_path / "outputs" / "dpo-stage" / "actor" / "adapter_model.safetensors")
    assert first.keys() == reference.keys() == final.keys()
    for name, value in first.items():
        torch.testing.assert_close(reference[name], value, rtol=0, atol=0)
    assert any(not torch.equal(final[name], value) for name, value in first.items())
    # The policy is its own reference until it is trained.
    assert float(names["dpo"].fitness[0]) == 0.0
    assert float(names["dpo"].fitness[-1]) != 0.0
    assert "margin before" in capsys.readouterr().out
    names["dpo"].clean_up()
