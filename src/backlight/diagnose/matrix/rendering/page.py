"""The report as one HTML page that works offline: no script, no outside resource."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from backlight.diagnose.matrix.rendering.escape import markup
from backlight.diagnose.matrix.report import CaseReport, MatrixReport, read_report
from backlight.diagnose.matrix.tree import Standing
from backlight.records import DiagnosisKind

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #8886}
table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;
border-bottom:1px solid #8884}code,pre{font:13px/1.4 ui-monospace,monospace;overflow-wrap:break-word}
pre{white-space:pre-wrap;background:#8881;padding:.6rem;margin:.4rem 0}
.v{font-weight:600;white-space:nowrap}.good{color:#1a7f37}.bad{color:#c0262d}.weak{color:#8a6100}
@media(prefers-color-scheme:dark){.good{color:#57c479}.bad{color:#ff7b80}.weak{color:#e0b040}}
details{margin:.4rem 0}summary{cursor:pointer}dt{font-weight:600}dd{margin:0 0 .3rem 1rem}
"""

_WEAK = {DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.SLOW}
_CLASSES = {Standing.SUPPORTED: "good", Standing.REFUTED: "bad", Standing.OPEN: "weak"}


def render_html(folder: Path) -> str:
    """Return the report of the matrix in ``folder`` as one page.

    Raises
    ------
    MatrixFolderError
        If the folder holds no report.
    """
    report = read_report(folder)
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{markup(report.name)}</title>"
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(_body(report)) + "\n</body></html>\n"
    )


def _body(report: MatrixReport) -> Iterator[str]:
    yield f"<h1>{markup(report.name)}: {markup(report.headline)}</h1>"
    yield f"<p>Plan <code>{markup(report.plan)}</code>, {markup(report.made)}</p>"
    yield "<h2>Cases</h2>"
    rows = (
        (
            f"<code>{markup(case.name)}</code>", _verdict(case.judgement.verdict),
            f"{case.seconds:.1f} of {case.limit:g} s",
            f"<code>{markup(case.control)}</code> {markup(case.factor)}", markup(case.judgement.claim),
        )
        for case in report.cases
    )  # fmt: skip
    yield _table(("case", "verdict", "time", "control, factor", "what"), rows)
    if report.not_run:
        yield f"<p>Not run: {markup(', '.join(report.not_run))}</p>"
    if report.comparisons:
        yield "<h2>Cases against their controls</h2>"
        yield _table(
            ("case", "control", "effect of the knob", "what it moved", "said"),
            (
                (
                    markup(c.case),
                    markup(c.control),
                    markup(c.effect.value),
                    markup("; ".join(c.seen)),
                    markup(c.claim),
                )
                for c in report.comparisons
            ),
        )
    if report.branches:
        yield "<h2>Decision tree</h2>"
        yield _table(
            ("standing", "branch", "why"),
            (
                (
                    f'<span class="v {_CLASSES[b.standing]}">{b.label}</span>',
                    markup(b.text), markup(b.why),
                )
                for b in report.branches
            ),
        )  # fmt: skip
    yield "<h2>What to do, in this order</h2>"
    yield _list(
        (
            f"{markup(a.do)}{f' at <code>{markup(a.at)}</code>' if a.at else ''}: {markup(a.why)}"
            f"<br>verify: <code>{markup(a.verify)}</code>"
            for a in report.actions
        ),
        "ol",
    )
    yield "<h2>Left open</h2>" + _list(markup(text) for text in report.open)
    yield "<h2>Evidence that could not be collected</h2>"
    yield _list(
        f"<code>{markup(case.name)}</code>: {markup(m.what)}: {markup(m.why)}"
        for case in report.cases
        for m in case.missing
    )
    yield "<h2>Evidence</h2>"
    for case in report.cases:
        yield from _evidence(case)
    yield "<h2>Environment</h2><dl>"
    yield from (
        f"<dt>{markup(label)}</dt><dd>{markup(text)}</dd>" for label, text in report.environment.items()
    )
    yield "</dl><h2>Commands to verify</h2>" + _list(
        f"<code>{markup(command)}</code>" for command in report.verify
    )


def _evidence(case: CaseReport) -> Iterator[str]:
    judgement = case.judgement
    yield f"<details><summary><code>{markup(case.name)}</code> {_verdict(judgement.verdict)}</summary><dl>"
    said = [
        ("command", case.command),
        ("directory", case.directory),
        ("branch", case.branch),
        ("line", judgement.line),
    ]
    said.append(("environment", " ".join(f"{k}={v}" for k, v in case.environment.items())))
    said += [("claim", f"{judgement.claim} (confidence: {judgement.confidence})")]
    said += [("because", "; ".join(judgement.because)), ("refuted if", judgement.refuted_if)]
    said += [("ended by", "; ".join(case.ended_by))]
    yield from (f"<dt>{label}</dt><dd><code>{markup(text)}</code></dd>" for label, text in said if text)
    yield (
        "<dt>files</dt><dd>"
        + _list(
            f'<a href="{quote(k.path)}"><code>{markup(k.path)}</code></a> {markup(k.what)}'
            for k in case.files
        )
        + "</dd></dl>"
    )
    if case.tail:
        yield "<pre>" + "\n".join(markup(line) for line in case.tail) + "</pre>"
    yield "</details>"


def _verdict(verdict: DiagnosisKind) -> str:
    kind = "good" if verdict is DiagnosisKind.PASS else "weak" if verdict in _WEAK else "bad"
    return f'<span class="v {kind}">{verdict.value}</span>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + f"</tr>{body}</table>"


def _list(entries: Iterable[str], kind: str = "ul") -> str:
    items = "".join(f"<li>{entry}</li>" for entry in entries)
    return f"<{kind}>{items}</{kind}>" if items else "<p>None.</p>"
