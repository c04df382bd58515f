"""Prints a test matrix: its cases before they run, the result of each, and the report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown

from backlight.cli.console import Page
from backlight.records import DiagnosisKind
from backlight.text import visible

if TYPE_CHECKING:
    from backlight.diagnose.test_matrix.evaluation import CaseResult
    from backlight.diagnose.test_matrix.plan import Case
    from backlight.diagnose.test_matrix.report import MatrixReport

_COLOURS = {DiagnosisKind.PASS: "green"} | dict.fromkeys(
    (DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.SLOW), "yellow"
)


def print_result(page: Page, one: CaseResult) -> None:
    """Print the line for a finished case: ``BLOCKED  case  12.0 s  claim``."""
    found = one.evaluation
    words = f"{visible(one.case.name)}  {one.observation.seconds:.1f} s  {visible(found.claim)}"
    verdict = f"{found.verdict.value:<15}", _COLOURS.get(found.verdict, "red")
    page.sentence(verdict, words, indent=15)


def print_report(report: MatrixReport, console: Console) -> None:
    """Print the short report; no text of a case or a plan acts on the terminal."""
    from backlight.diagnose.test_matrix.report import as_markdown

    # The joiner that keeps an address from being a link.
    console.print(Markdown(as_markdown(report, full=False).replace("&#8203;", ""), hyperlinks=False))


def print_cases(page: Page, cases: Sequence[Case]) -> None:
    """Print what a plan would run, and in which factor each case differs from its control."""
    for case in cases:
        against = f", {visible(case.factor)} against {visible(case.control)}" if case.control else ""
        page.sentence((visible(case.name), "bold"), f"{against}, at most {case.time_limit:g} s")
        page.sentence(f"    {visible(shlex.join(case.argv))}", indent=6)
