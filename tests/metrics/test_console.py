from __future__ import annotations

import io

from rich.console import Console

from agilerl.metrics.sinks import ConsoleSink

RECORD = {"kind": "train", "rows": 32, "tokens_per_s": 1234.4, "loss": 0.51234, "lr": 2e-5, "agent": 0}


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, highlight=False)


def text_of(target):
    return target.file.getvalue()


def test_plain_lines_without_a_terminal():
    target = console()
    sink = ConsoleSink(100, console=target)
    sink.write(RECORD)
    sink.close()
    line = text_of(target)
    assert "rows 32/100  1,234 trained tok/s  loss 0.5123  lr 2.00e-05" in line
    assert "left" in line
    assert "\x1b" not in line


def test_plain_training_lines_are_rare_but_the_last_one_is_shown():
    target = console()
    sink = ConsoleSink(100, console=target, every_s=3600)
    for rows in (10, 20, 100):
        sink.write({**RECORD, "rows": rows})
    assert [line.split("  ")[0] for line in text_of(target).splitlines()] == ["rows 10/100", "rows 100/100"]


def test_evaluations_and_events_are_always_shown():
    target = console()
    sink = ConsoleSink(100, console=target, every_s=3600)
    sink.write({"kind": "eval", "rows": 32, "loss": 1.5, "perplexity": 4.48, "agent": 1})
    sink.write({"kind": "event", "message": "saved [bold]here[/bold]"})
    assert (
        text_of(target) == "agent 1  rows 32/100  held out:  loss 1.5000  perplexity 4.480\nsaved [bold]here[/bold]\n"
    )


def test_a_terminal_gets_a_live_display_that_ends():
    target = console(terminal=True)
    sink = ConsoleSink(100, console=target)
    sink.write(RECORD)
    sink.write({**RECORD, "agent": 1})
    sink.write({"kind": "event", "message": "saved"})
    sink.write({**RECORD, "rows": 100})
    sink.close()
    shown = text_of(target)
    assert "saved" in shown
    assert "agent 0" in shown
    assert "100/100" in shown
    assert "trained tok/s" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is visible again


def test_an_unknown_total_shows_rows_alone():
    target = console()
    ConsoleSink(None, console=target).write(RECORD)
    assert "rows 32  " in text_of(target)
    assert "left" not in text_of(target)
