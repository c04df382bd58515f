"""Notebook displays of a run and of findings, evaluated now."""

from __future__ import annotations

from backlight.findings.evaluate import Findings, findings_of
from backlight.registry import DISPLAYS
from backlight.report.notebook import findings_html, run_html
from backlight.store.read.run import Run


@DISPLAYS.register("run")
def show_run(run: Run) -> str:
    """Return a run with its findings as HTML."""
    return run_html(run, findings_of(run))


@DISPLAYS.register("findings")
def show_findings(findings: Findings) -> str:
    """Return findings as HTML."""
    return findings_html(findings.run, findings)
