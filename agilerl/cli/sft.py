"""``agilerl sft``."""

from __future__ import annotations

from typing import Any

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
    """Fine-tune a model on prompts and answers.

    Without arguments: a small model learns a bundled data set, with its answers before and after. Any setting can be given
    as section.key=value, such as sft.lr=2e-5 or lora.rank=8.
    """
    quiet_libraries()
    options = options_of(model=model, data=data, test_data=test_data, output=output, overwrite=overwrite)
    return run("sft", words or [], options, resume, show_config)


def run(kind: str, words: list[str], options: dict[str, Any], resume: str | None, show_config: bool) -> int:
    """Describe, then do; shared by the commands that train."""
    # Settings are checked before torch is imported: a misspelt name costs no five seconds.
    from agilerl.recipes.describe import describe

    description = describe(words, options=options, resume=resume, prefer=kind)
    if show_config:
        from agilerl.recipes.report import Reporter

        Reporter().settings(description.loaded, everything=True)
        return 0
    from agilerl.cli.training import train

    return train(kind, description)
