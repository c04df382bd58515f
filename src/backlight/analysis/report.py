"""Report of a stored run as HTML, Markdown, images or an archive: rules evaluated, health scored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backlight import codec
from backlight.findings.evaluate import findings_of
from backlight.monitors.health.model.parameters import untrained_parameters
from backlight.monitors.health.model.score import health_series
from backlight.records import Finding
from backlight.report.llms import render_llms
from backlight.report.markdown import render_markdown
from backlight.report.page import render_page, write_page
from backlight.report.source import Source
from backlight.store.read.run import Run, open_run

if TYPE_CHECKING:
    from backlight.report.plots.writer import Written


def write_html(path: Path, target: Path) -> Path:
    """Write the page of the run in ``path`` to ``target`` and return where it is."""
    return write_page(render_page(source_of(open_run(path))), target)


def write_pictures(path: Path, folder: Path) -> Written:
    """Write the panels of the run in ``path`` as SVG and PNG into ``folder``; return what was written."""
    from backlight.report.plots.writer import write_plots  # noqa: PLC0415 - only here

    return write_plots(source_of(open_run(path)), folder)


def write_bundle(path: Path, target: Path) -> Path:
    """Write report, findings, evidence and environment of a run as one archive; return where it is.

    The recorded series are left out: they may be gigabytes, and the report shows them. Errors are those of
    :func:`backlight.store.export.check_archive` and :func:`backlight.store.read.run.open_run`.
    """
    from backlight.store.export import check_archive, write_archive  # noqa: PLC0415 - only here

    check_archive(target)
    run = open_run(path)
    with tempfile.TemporaryDirectory(prefix="backlight-") as folder:
        return write_archive(target, _members(run, Path(folder)))


def _members(run: Run, folder: Path) -> Iterator[tuple[str, Path | bytes]]:
    ranks = {
        attempt.index: {str(rank): run.fingerprint(attempt.index, rank) for rank in attempt.ranks}
        for attempt in run.attempts
    }
    environment = {
        "run": run.name,
        "run_id": run.run_id,
        "attempts": [
            {**codec.plain(attempt), "fingerprints": codec.plain(ranks[attempt.index])}
            for attempt in run.attempts
        ],
        "losses": list(run.losses),
    }
    yield "report.html", write_html(run.path, folder / "report.html")
    yield "report.md", write_markdown(run.path, folder / "report.md")
    yield "findings.json", codec.encode(findings_of(run)).encode()
    yield "environment.json", codec.encode(environment).encode()
    yield "events.json", codec.encode([codec.plain(event) for event in run.events()]).encode()
    for name in run.evidence():
        yield name, run.read_evidence(name)


def source_of(run: Run, findings: Sequence[Finding] | None = None) -> Source:
    """Return what a report shows of ``run``; ``findings`` are those of the caller, if it has them already."""
    health = health_series(run)
    return Source(
        run,
        tuple(findings_of(run) if findings is None else findings),
        (health.steps, health.score) if len(health.steps) else None,
        untrained_parameters(run),
    )


def write_llms(path: Path, target: Path) -> Path:
    """Write the run in ``path`` as a short text for a language model to ``target`` and return where it is."""
    run = open_run(path)
    return write_page(render_llms(run, findings_of(run)), target)


def write_markdown(path: Path, target: Path) -> Path:
    """Write the report of the run in ``path`` as Markdown to ``target`` and return where it is."""
    run = open_run(path)
    return write_page(render_markdown(run, findings_of(run)), target)
