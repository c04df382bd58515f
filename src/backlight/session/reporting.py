"""A stored run to its report: judge it, score it, hand both to the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from backlight.health.scoring import health_series
from backlight.report.markdown import render_markdown
from backlight.report.page import write_report
from backlight.session.judge import findings_of, thresholds
from backlight.store.reader import open_run


def write_html(path: Path, target: Path) -> Path:
    """Write the page of the run in ``path`` to ``target`` and return where it is."""
    run = open_run(path)
    health = health_series(run)
    scored = (health.steps, health.score) if len(health.steps) else None
    in_use = {
        room: dataclasses.asdict(limits)
        for room in run.rooms
        if (limits := thresholds(room, run.overrides.get(room)))
    }
    return write_report(run, findings_of(run), target, health=scored, thresholds=in_use)


def write_markdown(path: Path, target: Path) -> Path:
    """Write the report of the run in ``path`` as Markdown to ``target`` and return where it is."""
    run = open_run(path)
    text = render_markdown(run, findings_of(run))
    partial = target.with_name(target.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    return target
