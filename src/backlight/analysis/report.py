"""A stored run to its report: judge it, score it, hand both to the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backlight.analysis.grokking import examined_where_possible
from backlight.findings.evaluate import findings_of
from backlight.measure.spectra.shrinkage import muon
from backlight.monitors.grokking.model.curves import Interval
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.monitors.health.model.groups import GroupError, group_rms
from backlight.monitors.health.model.score import health_series
from backlight.records import Finding
from backlight.report.grokking_verdict import Followed, Learning, Row
from backlight.report.markdown import render_markdown
from backlight.report.page import render_page, write_page
from backlight.report.plots.writer import Written, write_animations, write_plots
from backlight.report.source import Source
from backlight.store.read.run import Run, open_run


def write_html(path: Path, target: Path) -> Path:
    """Write the page of the run in ``path`` to ``target`` and return where it is."""
    return write_page(render_page(source_of(open_run(path))), target)


def write_pictures(path: Path, folder: Path, *, animate: bool = False) -> Written:
    """Write the panels of the run in ``path`` as SVG and PNG into ``folder``; return what was written.

    With ``animate`` also the slider over the steps of its spectra, as PNG files and as GIF.
    """
    source = source_of(open_run(path))
    written = write_plots(source, folder)
    if not animate:
        return written
    return dataclasses.replace(written, files=(*written.files, *write_animations(source, folder)))


def source_of(run: Run, findings: Sequence[Finding] | None = None) -> Source:
    """Return what a report shows of ``run``: judged, scored, with its groups and its verdict on grokking.

    ``findings`` are those of the caller, who judged it already.
    """
    health = health_series(run)
    return Source(
        run,
        tuple(findings_of(run) if findings is None else findings),
        (health.steps, health.score) if len(health.steps) else None,
        groups=_groups(run),
        learning=learning_of(run),
        muon=muon,
    )


def learning_of(run: Run) -> Learning | None:
    """Return the verdict on grokking with its control, for the report; None where there is none."""
    found = examined_where_possible(run) if "grokking" in run.monitors else None
    if found is None:
        return None
    detection, theirs = found.detection, found.control_detection
    return Learning(
        verdict=_verdict(detection),
        claim=detection.claim,
        memorised=_between(detection.memorised),
        generalised=_between(detection.generalised),
        conditions=[Row(c.name, c.expected, c.got, c.held) for c in detection.conditions],
        swept=(sum(p.grokking for p in detection.sweep), len(detection.sweep)) if detection.sweep else None,
        notes=detection.notes,
        control=found.control,
        control_verdict=_verdict(theirs) if theirs else "",
        control_claim=theirs.claim if theirs else "",
        is_control=bool(found.facts.control),
        following=[
            Followed(
                f.measure,
                f.correlation,
                f.lead_steps if f.lead_logs else 0,
                f.control,
                f.levels,
                f.conclusion,
            )
            for f in found.following
        ],
        changes=found.changes,
    )


def _verdict(detection: Detection) -> str:
    return "grokking, strong" if detection.strong else detection.verdict.value


def _between(interval: Interval | None) -> tuple[int, int] | None:
    return None if interval is None else (interval.after, interval.by)


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
