"""A stored run to its report: judge it, score it, hand both to the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backlight.health.groups import GroupError, group_rms
from backlight.health.scoring import health_series
from backlight.report.markdown import render_markdown
from backlight.report.page import write_report
from backlight.session.judge import findings_of, thresholds
from backlight.store.reader import Run, open_run


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
    return write_report(run, findings_of(run), target, health=scored, thresholds=in_use, groups=_groups(run))


def _groups(run: Run) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    found = {}
    for name, pattern in run.groups.items():
        try:
            rms = group_rms(run, pattern)
        except GroupError:
            continue  # said by the session, as an event
        found[name] = (rms.steps, rms.values)
    return found


def write_markdown(path: Path, target: Path) -> Path:
    """Write the report of the run in ``path`` as Markdown to ``target`` and return where it is."""
    run = open_run(path)
    text = render_markdown(run, findings_of(run))
    partial = target.with_name(target.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    return target
