"""``agilerl dpo``."""

from __future__ import annotations

from agilerl.cli.sft import run
from agilerl.cli.words import (
    Data,
    Model,
    Output,
    Overwrite,
    Resume,
    ShowConfig,
    TestData,
    Words,
    options_of,
    quiet_libraries,
)

__all__ = ["command"]


def command(
    words: Words = None,
    model: Model = None,
    data: Data = None,
    test_data: TestData = None,
    output: Output = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    show_config: ShowConfig = False,
) -> int:
    """Align a fine-tuned model with pairs of a chosen and a rejected answer.

    --model takes a checkpoint of `agilerl sft`, which training goes on from, or any model. Without arguments: the model of
    `agilerl sft`'s demonstration learns, from a bundled set, to ask for what a request leaves out instead of guessing.
    """
    quiet_libraries()
    options = options_of(model=model, data=data, test_data=test_data, output=output, overwrite=overwrite)
    return run("dpo", words or [], options, resume, show_config)
