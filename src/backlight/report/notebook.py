"""A run and its findings as HTML in the cell of a notebook: inline styles, no scripts, light or dark.

Everything from a run is escaped: no name can become markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from backlight.findings.evaluate import separate_hints
from backlight.findings.losses import losses_of
from backlight.records import Finding, Severity
from backlight.report.source import Source
from backlight.report.verdict import RunOutcome, outcome, sampled_text, where
from backlight.store.read.run import Run
from backlight.text import as_typed, count, html_of, number, visible

MOST = 20
"""Findings that a cell shows; the rest of them is counted."""

# Seen on white and on black: each has a contrast of 3:1 or more against both.
_COLOURS = {Severity.ERROR: "#e5484d", Severity.WARNING: "#b8860b", Severity.INFO: "#3b82c4"}
_TONES = {"error": "#e5484d", "warning": "#b8860b", "info": "#3b82c4", "clear": "#2e8b57"}


def run_html(run: Run, findings: Sequence[Finding]) -> str:
    """Return the verdict, the first and last loss and total norm, and the findings of a run."""
    source = Source(run, tuple(findings))
    view = outcome(source)
    status = " · ".join(part for part in (view.state, view.status) if part)
    parts = [
        f"<div><strong>{html_of(run.name or 'unnamed run')}</strong> <small>{html_of(status)}</small></div>",
        _verdict(view),
        *(f"<div>{html_of(line.text)}</div>" for line in view.lines),
        *(f'<div style="color:{_TONES["warning"]}">Lost: {html_of(loss)}</div>' for loss in view.losses),
    ]
    figures = []
    for name, scalar in {**losses_of(run), "total norm": run.scalar("total_norm")}.items():
        if len(scalar.steps):
            first, last = (number(float(scalar.values[i])) for i in (0, -1))
            figures.append(f"{name} {first} to {last}")
    figures += filter(None, [sampled_text(run)])
    if figures:
        parts.append(f"<div>{html_of(' · '.join(figures))}</div>")
    if source.findings:
        parts.append(_table(source.findings))
    parts += [f"<div><small>{html_of(withdrawal.text)}</small></div>" for withdrawal in view.withdrawn]
    if view.unmeasured:
        parts.append(
            f"<div><small>{count(len(view.unmeasured), 'thing')} not measured: see the report.</small></div>"
        )
    parts.append(f"<div><small><code>backlight report {html_of(run.location)}</code></small></div>")
    return f'<div style="line-height:1.45">{"".join(parts)}</div>'


def live_cell(
    path: Path,
    state: str,
    steps: int,
    figures: Mapping[str, tuple[int, float]],
    findings: Sequence[Finding],
    lacks: str = "",
) -> dict[str, str]:
    """Return what a cell shows while it trains, as text and as HTML, by MIME type.

    That is state, ``steps`` done, ``figures`` with the steps that they are of, the findings, and what the run
    ``lacks`` of a recording to its end.
    """
    shown = [
        f"{label} {number(value)}" + (f" at step {number(step)}" if step < steps - 1 else "")
        for label, (step, value) in figures.items()
    ]
    status = " · ".join((state, count(steps, "step"), *shown))
    findings, _ = separate_hints(findings)
    listed = findings[:MOST]
    notes = [f"and {count(len(findings) - MOST, 'more finding')}"] if len(findings) > MOST else []
    if lacks:
        notes.append(f"{visible(lacks)}.")
    elif not findings and state != "running":
        what = "No findings" if state == "finished" else f"Nothing was found before it {state}"
        notes.append(f"{what}. Only recorded data was checked." if steps else "Nothing was measured.")
    call = f"backlight.open_run({as_typed(path)!r}).report()"
    text = "\n".join((
        f"backlight: {visible(status)}",
        *(f"{finding.severity.value}: {visible(finding.title)} ({finding.rule})" for finding in listed),
        *notes, visible(call),
    ))  # fmt: skip
    parts = [
        f"<div><strong>backlight</strong> {html_of(status)}</div>",
        *(
            f'<div><strong style="color:{_COLOURS[finding.severity]}">{finding.severity.value}</strong> '
            f"{html_of(finding.title)} <small>({html_of(finding.rule)})</small></div>"
            for finding in listed
        ),
        *(f"<div>{html_of(note)}</div>" for note in notes),
        f"<div><small><code>{html_of(call)}</code></small></div>",
    ]
    return {"text/plain": text, "text/html": f'<div style="line-height:1.45">{"".join(parts)}</div>'}


class InlineReport(str):
    """The page of a run, shown inline by a notebook: a document of its own, which requests nothing."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width:100%;height:80vh;min-height:600px;border:1px solid #8884"
        page = html.escape(self, quote=True)
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="report" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"<report, {len(self):,} characters of HTML; as the last line of a cell it is shown inline>"


def findings_html(run: Run, findings: Sequence[Finding]) -> str:
    """Return the verdict, and the findings as a table, worst first."""
    source = Source(run, tuple(findings))
    parts = [_verdict(outcome(source)), _table(source.findings) if source.findings else ""]
    return f'<div style="line-height:1.45">{"".join(parts)}</div>'


def _verdict(view: RunOutcome) -> str:
    tone = _TONES.get(view.tone, "currentColor")
    return f'<div><strong style="color:{tone}">{html_of(view.tally)}.</strong> {html_of(view.detail)}</div>'


def _table(findings: Sequence[Finding]) -> str:
    rows = []
    cell = 'style="text-align:left;vertical-align:top;padding:.15em .8em .15em 0"'
    for finding in findings[:MOST]:
        place = "; ".join(f"{label} {what}" for label, what in where(finding))
        colour = _COLOURS[finding.severity]
        rows.append(
            f'<tr><td {cell}><strong style="color:{colour}">{finding.severity.value}</strong>'
            f"</td><td {cell}><code>{html_of(finding.rule)}</code></td><td {cell}>"
            f"<strong>{html_of(finding.title)}</strong><br>{html_of(finding.detail)}"
            f"<br><small>{html_of(place)}</small></td><td {cell}>{html_of(finding.fix)}</td></tr>"
        )
    head = "".join(f"<th {cell}>{name}</th>" for name in ("", "rule", "finding", "fix"))
    rest = len(findings) - MOST
    more = f"<div><small>and {count(rest, 'more finding')}</small></div>" if rest > 0 else ""
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{"".join(rows)}</table>{more}'
