"""A stored run as one HTML file that works offline: no request leaves it, no name in it becomes markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from backlight import __version__, atomic_files
from backlight.findings.pages import rule_page
from backlight.records import Finding
from backlight.registry import warn
from backlight.report import verdict
from backlight.report.evidence_links import label_of, place_of
from backlight.report.page_codec import PRECISION, script_json
from backlight.report.panel import (
    STATED,
    Drawn,
    Failed,
    NotMeasured,
    Panel,
    PanelWarning,
    failed,
    in_order,
    shown,
)
from backlight.report.source import Source
from backlight.report.sparkline import evidence_line
from backlight.text import number, visible

ASSETS = files("backlight.report") / "assets"
VENDOR = files("backlight.report") / "vendor"

SCRIPTS = (
    *("words.js", "elements.js", "data.js", "view.js", "palette.js", "grid.js"),
    *("axes.js", "chart_data.js", "marks.js", "charts.js", "findings.js"),
)
"""What the drawers in ``assets/kinds`` stand on, in the order of their needs; ``page.js`` follows them."""

UNDRAWN = (
    "This report draws its charts with JavaScript, which is switched off here. "
    "<code>backlight findings RUN</code> prints the findings."
)
"""What the page says in a browser without scripts."""


def write_page(text: str, target: Path) -> Path:
    """Write a page as a whole, or not at all, and return its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(target, text.encode())
    return target


def render_page(source: Source) -> str:
    """Return the page of a run as text; what cannot be drawn is a :class:`PanelWarning`, and named on it."""
    drawn = rendered(source)
    name = visible(source.run.name)
    try:
        return document(_content(source, drawn), name)
    except Exception:
        written = [(panel, _writable(panel, result)) for panel, result in drawn]
        if all(new is old for (_, new), (_, old) in zip(written, drawn, strict=True)):
            raise  # it is not the data of a panel
        return document(_content(source, written), name)


def _writable(panel: Panel, result: Drawn | NotMeasured) -> Drawn | NotMeasured:
    """Return ``result``, or why it is no data that a page can hold: a panel may have drawn anything."""
    try:
        script_json(panel_data(panel, result))
    except Exception as error:  # noqa: BLE001 - a third-party panel may raise anything
        return _warned(failed(panel, error))
    return result


def _warned(result: Drawn | NotMeasured) -> Drawn | NotMeasured:
    if isinstance(result, Failed):
        warn(f"backlight: {result.reason}", PanelWarning)
    return result


def document(
    content: Mapping[str, Any],
    name: str,
    *,
    last: str = "static.js",
    connect: str = "",
    without: str = UNDRAWN,
) -> str:
    """Return a page that shows ``content``, which has the form of what :func:`model` returns.

    ``last`` is the asset that starts the page, ``connect`` what it may ask for (nothing), ``without`` what
    it says in a browser without scripts.
    """
    style = _read(VENDOR / "uPlot.min.css") + _read(ASSETS / "page.css")
    program = _program(last)
    library = _read(VENDOR / "uPlot.iife.min.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(library)} {_hash(program)}",
            f"style-src {_hash(style)}",
            *([f"connect-src {connect}"] if connect else []),
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    title = html.escape(f"{name} · backlight".encode("utf-8", "replace").decode())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>{without}</noscript>
<script type="application/json" id="report">{script_json(content)}</script>
<script>{library}</script>
<script>{program}</script>
</body>
</html>
"""


def model(source: Source) -> dict[str, Any]:
    """Return everything that the page shows, as JSON types and numpy arrays."""
    return _content(source, rendered(source))


def _content(source: Source, drawn: Sequence[tuple[Panel, Drawn | NotMeasured]]) -> dict[str, Any]:
    return {**head(source, drawn), "panels": [panel_data(panel, result) for panel, result in drawn]}


def head(source: Source, drawn: Sequence[tuple[Panel, Drawn | NotMeasured]]) -> dict[str, Any]:
    """Return what the page shows next to its panels; ``drawn`` tells which of them have data."""
    rows = _rows(source)
    whole = [panel for panel, _ in drawn]
    with_data = {panel.name for panel, result in drawn if isinstance(result, Drawn)}
    summary = verdict.outcome(source)
    every = (*source.findings, *source.hints)
    return {
        "steps": source.step_range,
        "run": {
            "name": visible(source.run.name) or "unnamed run",
            "status": summary.state,
        },
        "verdict": {
            "tone": summary.tone,
            "headline": summary.headline,
            "detail": summary.summary,
            "status": summary.status,
            "about": summary.about,
            "lines": [visible(line.text) for line in summary.lines],
            "losses": [*summary.losses, *(withdrawal.text for withdrawal in summary.withdrawn)],
            "lead": next(
                (i for i, f in enumerate(source.findings) if visible(f.title) == summary.headline), None
            ),
            "unmeasured": _unmeasured(summary, drawn, source),
            "figures": [
                {"label": label, "value": value, "note": note}
                for label, value, note in verdict.summary_of(source).figures(source)
            ],
        },
        "findings": [_finding(finding, source, whole, with_data, rows) for finding in source.findings],
        "hints": [_finding(hint, source, whole, with_data, rows) for hint in source.hints],
        "pages": {rule: rule_page(rule) for rule in sorted({f.rule for f in every})},
        "attempts": [a.step_offset for a in source.run.attempts[1:]],
        "parameters": [
            {
                "name": visible(record.name),
                "shape": " \N{MULTIPLICATION SIGN} ".join(map(str, record.shape)) or "scalar",
                "numel": record.numel,
                "dtype": visible(record.dtype),
                "module": visible(record.module_type),
                "aliases": [visible(alias) for alias in record.aliases],
                "group": visible(record.group),
            }
            for record in source.parameters
        ],
        "reasons": {
            visible(name): visible(reason)
            for reason, names in source.unmeasured_parameters.items()
            for name in names
        },
        "precision": f"{100 * PRECISION:.2f} %",
        "version": __version__,
    }


def rendered(source: Source) -> list[tuple[Panel, Drawn | NotMeasured]]:
    """Return every panel in order; those without data of monitors that did not watch are left out.

    One that raises is a :class:`PanelWarning`, and says so in its place.
    """
    results = [(panel, _warned(shown(panel, source))) for panel in in_order()]
    return [(panel, result) for panel, result in results if belongs(panel, result, source)]


def belongs(panel: Panel, result: Drawn | NotMeasured, source: Source) -> bool:
    """Return whether a panel stands on the page: with data, where it raised, and where it would be missed."""
    return isinstance(result, Drawn | Failed) or (source.watched(panel.monitor) and not panel.optional)


def _unmeasured(
    summary: verdict.RunOutcome, drawn: Sequence[tuple[Panel, Drawn | NotMeasured]], source: Source
) -> list[dict[str, Any]]:
    """Return what was not measured, panels without data among it; what has one reason stands together."""
    gaps: dict[str, dict[str, Any]] = {}
    rows: list[tuple[str, str | None, str, tuple[str, ...]]] = [
        (item.what, None, item.reason, item.names) for item in summary.unmeasured
    ]
    rows += [(p.title, p.name, visible(r.reason), ()) for p, r in drawn if isinstance(r, NotMeasured)]
    for what, panel, reason, names in rows:
        key = reason.rstrip(".").casefold() if not names else f"{what} {reason}"
        gap = gaps.setdefault(key, {"what": [], "reason": reason, "names": names})
        if panel is not None and any(entry["text"].casefold() == what.casefold() for entry in gap["what"]):
            continue
        gap["what"].append({"text": what, "panel": panel})
    absent = sorted({panel.monitor for panel in in_order() if not source.watched(panel.monitor)})
    if absent:
        what = "Monitor not watched" if len(absent) == 1 else "Monitors not watched"
        named = {"what": [{"text": what, "panel": None}], "reason": f"{', '.join(absent)}.", "names": ()}
        gaps["monitors"] = named
    return list(gaps.values())


def announced(panel: Panel, result: Drawn | NotMeasured) -> dict[str, Any]:
    """Return one panel without its data, or with the one line of text that it is, or why it has none."""
    named = {"name": panel.name, "title": panel.title, "note": panel.note, "place": panel.place}
    if isinstance(result, Drawn) and result.kind == STATED:
        return named | {"stated": visible(result.data["text"])}
    if isinstance(result, Drawn):
        return named | {"kind": result.kind}
    missing = named | {"missing": visible(result.reason)}
    return missing | {"kind": "failed"} if isinstance(result, Failed) else missing


def panel_data(panel: Panel, result: Drawn | NotMeasured) -> dict[str, Any]:
    """Return one panel as the page takes it: with its data, or with the reason why it has none."""
    named = announced(panel, result)
    if isinstance(result, Failed):
        return named | {"data": {"reason": named["missing"]}}
    if not isinstance(result, Drawn) or result.kind == STATED:
        return named
    facts = [{"label": fact.label, "value": fact.value} for fact in result.facts]
    return named | {"facts": facts, "remarks": result.remarks, "data": dict(result.data)}


def _rows(source: Source) -> dict[str, int]:
    rows = {alias: row for row, record in enumerate(source.parameters) for alias in record.aliases}
    return rows | {record.name: row for row, record in enumerate(source.parameters)}


def _finding(
    finding: Finding,
    source: Source,
    panels: Sequence[Panel],
    drawn: Collection[str],
    rows: Mapping[str, int],
) -> dict[str, Any]:
    places = [place_of(evidence, finding, panels, drawn, rows) for evidence in finding.evidence]
    return {
        "rule": visible(finding.rule),
        "version": finding.version,
        "severity": finding.severity.value,
        "step": finding.subject.step,
        "title": visible(finding.title),
        "detail": visible(finding.detail),
        "where": [{"label": label, "value": value} for label, value in verdict.where(finding)],
        "evidence": [
            {
                "path": path,
                "label": label_of(path),
                "step": step,
                "value": value,
                "place": place and dataclasses.asdict(place),
            }
            for (path, step, value), place in zip(verdict.measurements(finding), places, strict=True)
        ],
        "line": evidence_line(zip(finding.evidence, places, strict=True), source),
        "fix": visible(finding.fix),
        "refuted": visible(finding.refuted_if),
        "overridden": [f"{visible(name)} = {number(value, 6)}" for name, value in finding.overridden.items()],
    }


def _program(last: str) -> str:
    """Return the page's own script: one scope, the drawers of ``assets/kinds`` between base and page."""
    kinds = sorted(entry.name for entry in (ASSETS / "kinds").iterdir() if entry.name.endswith(".js"))
    parts = [_read(ASSETS / name) for name in SCRIPTS]
    parts += [_read(ASSETS / "kinds" / name) for name in kinds]
    parts += [_read(ASSETS / "page.js"), _read(ASSETS / last)]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def _read(file: Traversable) -> str:
    return file.read_text(encoding="utf-8").strip() + "\n"


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
