"""Displays of a run and of findings, evaluated now, for a notebook and as the command prints them."""

from __future__ import annotations

import io

from backlight.analysis.report import source_of
from backlight.findings.evaluate import Findings, findings_of
from backlight.registry import DISPLAYS
from backlight.report.notebook import InlineReport, findings_html, run_html
from backlight.report.page import render_page
from backlight.report.terminal import print_findings
from backlight.store.read.run import Run
from backlight.terminal import make_console


@DISPLAYS.register("run")
def show_run(run: Run) -> str:
    """Return a run with its findings as HTML."""
    return run_html(run, findings_of(run))


@DISPLAYS.register("report")
def show_report(run: Run) -> str:
    """Return the page of a run, which a notebook shows inline."""
    return InlineReport(render_page(source_of(run)))


@DISPLAYS.register("findings")
def show_findings(findings: Findings) -> str:
    """Return findings as HTML."""
    return findings_html(findings.run, findings)


@DISPLAYS.register("findings as text")
def findings_text(findings: Findings) -> str:
    """Return what ``backlight findings`` prints, without the end of the last line."""
    text = io.StringIO()
    # In a notebook a console would display what it prints, and not write it.
    print_findings(findings.run, findings, make_console(file=text, force_jupyter=False))
    return text.getvalue().removesuffix("\n")
