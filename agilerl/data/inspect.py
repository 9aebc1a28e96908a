"""Rows as the model sees them, for a person: which tokens are trained, and why."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agilerl.data.encoder import TextEncoder
from agilerl.data.records import Example
from agilerl.data.summary import Summary

__all__ = ["Piece", "RowView", "as_html", "summary_lines", "view_row"]


@dataclass(frozen=True)
class Piece:
    """A run of tokens under one rule."""

    tokens: tuple[str, ...]
    """Text of each token; a character made of several tokens stands at its last one."""
    weight: float
    rule: str

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.tokens)


@dataclass(frozen=True)
class RowView:
    """One row, taken apart."""

    row: int
    side: str
    """Empty, ``chosen`` or ``rejected``."""
    text: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int

    @property
    def trained_text(self) -> list[str]:
        """Text of each trained run."""
        runs: list[str] = []
        before = False
        for piece in self.pieces:
            if piece.weight:
                if before:
                    runs[-1] += piece.text
                else:
                    runs.append(piece.text)
            before = bool(piece.weight)
        return runs

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        side = {"side": self.side} if self.side else {}
        return {
            "row": self.row,
            **side,
            "text": self.text,
            "trained_text": self.trained_text,
            "tokens": self.num_tokens,
            "trained_tokens": self.num_trained,
            "pieces": [{"text": piece.text, "weight": piece.weight, "rule": piece.rule} for piece in self.pieces],
        }


def view_row(example: Example, row: int, encoder: TextEncoder, side: str = "") -> RowView:
    """Take a row apart into runs of tokens that are trained or not, each with the rule that says so."""
    ids = example.ids.tolist()
    controls = {index: text for text, index in encoder.control_ids.items()}
    pieces: list[Piece] = []
    for start, end, weight, rule in _runs(example, ids, encoder, controls):
        pieces.append(Piece(tuple(_token_texts(encoder, ids[start:end])), weight, rule))
    return RowView(row, side, _decode(encoder, ids), tuple(pieces), len(ids), example.num_targets)


def summary_lines(summary: Summary, *, batch_size: int | None = None, epochs: int = 1) -> list[tuple[str, str]]:
    """A split in short, as (what, how much) lines for a person.

    Args:
        summary: The numbers.
        batch_size: Rows of an optimizer step, to tell the steps to come.
        epochs: Passes to come.
    """
    report = summary.report
    lines = [("format", f"{report.format}, from {report.source}" if report.source else report.format)]
    rows = f"{report.rows_in:,} read, {report.rows_kept:,} kept"
    if summary.rows != report.rows_kept:
        rows += f" as {summary.rows:,} examples"
    left_out = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in report.dropped.most_common())
    dropped = f"; dropped: {left_out}" if left_out else ""
    lines.append(("rows", rows + dropped + (f"; cut: {report.cut:,}" if report.cut else "")))
    share = summary.trained_tokens / summary.tokens if summary.tokens else 0.0
    lines.append(("tokens", f"{summary.tokens:,}, of which {summary.trained_tokens:,} ({share:.0%}) are trained"))
    if summary.percentiles:
        p = summary.percentiles
        lines.append(
            (
                "length",
                f"median {p[50]}, 95 % below {p[95]}, longest {summary.longest[1]} (row {summary.longest[0]}), "
                f"shortest {summary.shortest[1]} (row {summary.shortest[0]})",
            )
        )
    stops = ", ".join(f"{text} {count:,}" for text, count in summary.stop_tokens.items()) or "none"
    lines.append(("answers end in", stops + (f"; unfinished: {summary.unfinished:,}" if summary.unfinished else "")))
    if summary.with_bos:
        twice = f", twice in {summary.with_double_bos:,}" if summary.with_double_bos else ""
        lines.append(("BOS", f"opens {summary.with_bos:,} rows{twice}"))
    worth_a_look = {name.replace("_", " "): count for name, count in report.notes.items() if name != "cut"}
    if summary.num_duplicates:
        worth_a_look["duplicates"] = summary.num_duplicates
    if worth_a_look:
        lines.append(("worth a look", ", ".join(f"{name} {count:,}" for name, count in worth_a_look.items())))
    lines += [("note", notice) for notice in report.notices]
    if batch_size:
        lines.append(("optimizer steps", f"{summary.steps(batch_size, epochs):,} of {batch_size} rows"))
    return lines


def _runs(
    example: Example, ids: list[int], encoder: TextEncoder, controls: dict[int, str]
) -> Iterator[tuple[int, int, float, str]]:
    position = 0
    if ids and ids[0] == encoder.bos_id and not (example.spans and example.spans[0].start == 0):
        yield 0, 1, 0.0, "BOS, opens the row"
        position = 1
    for number, span in enumerate(example.spans, start=1):
        if span.start > position:
            rule = "prompt, not trained" if number == 1 else "between answers, not trained"
            yield position, span.start, 0.0, rule
        name = f"answer {number}" if len(example.spans) > 1 else "answer"
        trained = "trained" if span.weight == 1.0 else f"trained with weight {span.weight:g}"
        has_stop = ids[span.end - 1] in controls
        end = span.end - 1 if has_stop else span.end
        if end > span.start:
            yield span.start, end, span.weight, f"{name}, {trained}"
        if has_stop:
            yield end, span.end, span.weight, f"stop token of {name}, {trained}"
        position = span.end
    if position < len(ids):
        rule = "after the last answer, not trained" if example.spans else "nothing is trained"
        yield position, len(ids), 0.0, rule


def _token_texts(encoder: TextEncoder, ids: Sequence[int]) -> Iterator[str]:
    """Text of each token; bytes of a character that is not complete yet wait for its last token."""
    waiting: list[int] = []
    before = ""
    done: list[int] = []
    for token in ids:
        waiting.append(token)
        text = _decode(encoder, [*done, *waiting])
        if text.endswith("\ufffd") and len(waiting) < 8:
            yield ""
            continue
        yield text[len(before) :]
        # Keep one token of context: some tokenizers drop the space before the first token they decode.
        done = waiting[-1:]
        before = _decode(encoder, done)
        waiting = []
    if waiting:
        yield _decode(encoder, [*done, *waiting])[len(before) :]


def _decode(encoder: TextEncoder, ids: Sequence[int]) -> str:
    return encoder.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


_STYLE = (
    "body{font:15px/1.6 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "pre{white-space:pre-wrap;word-break:break-word;background:#f6f6f4;padding:.8rem;border-radius:6px}"
    ".t{background:#bfe3c0}.t:nth-child(even){background:#a6d6a8}.p:nth-child(even){background:#ececea}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre{background:#222}"
    ".t{background:#1f4d2b}.t:nth-child(even){background:#2a6338}.p:nth-child(even){background:#2c2c2c}}"
)


def as_html(views: Sequence[RowView], summary: Sequence[tuple[str, str]]) -> str:
    """A page with the summary and the rows; hover over a token for the rule that decides it."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Training data</title><style>{_STYLE}</style><h1>Training data</h1>"
    ]
    parts.append("<table>")
    parts += [f"<tr><th>{html.escape(key)}<td>{html.escape(value)}" for key, value in summary]
    parts.append("</table>")
    for view in views:
        side = f", {view.side}" if view.side else ""
        parts.append(f"<h2>Row {view.row}{side}</h2><p>{view.num_tokens} tokens, {view.num_trained} trained</p><pre>")
        for piece in view.pieces:
            kind = "t" if piece.weight else "p"
            parts += [
                f'<span class="{kind}" title="{html.escape(piece.rule)}">{html.escape(token)}</span>'
                for token in piece.tokens
            ]
        parts.append("</pre>")
    return "".join(parts) + "\n"
