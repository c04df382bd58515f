"""Prints a test matrix: its cases before they run, the result of each, and the report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from backlight.cli.console import make_table
from backlight.records import DiagnosisKind
from backlight.text import visible

if TYPE_CHECKING:
    from backlight.diagnose.test_matrix.evaluation import CaseResult
    from backlight.diagnose.test_matrix.plan import Case
    from backlight.diagnose.test_matrix.report import MatrixReport

_COLOURS = {DiagnosisKind.PASS: "green"} | dict.fromkeys(
    (DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.SLOW), "yellow"
)


def result_line(one: CaseResult) -> Text:
    """Return the line for a finished case: ``BLOCKED  case  12.0 s  claim``."""
    found = one.evaluation
    text = Text(f"{found.verdict.value:<15}", style=_COLOURS.get(found.verdict, "red"))
    words = f"{visible(one.case.name)}  {one.observation.seconds:.1f} s  {visible(found.claim)}"
    return text.append(words, style="default")


def print_report(report: MatrixReport, console: Console) -> None:
    """Print the short report; no text of a case or a plan acts on the terminal."""
    from backlight.diagnose.test_matrix.report import as_markdown

    # The joiner that keeps an address from being a link.
    console.print(Markdown(as_markdown(report, full=False).replace("&#8203;", ""), hyperlinks=False))


def print_cases(cases: Sequence[Case], console: Console) -> None:
    """Print what a plan would run, and in which factor each case differs from its control."""
    columns = ("control", "differs in", "limit", "command")
    table = make_table("case", *columns, folded=columns)
    for case in cases:
        limit = f"{case.time_limit:g} s"
        words = (case.name, case.control, case.factor, limit, shlex.join(case.argv))
        table.add_row(*map(visible, words))
    console.print(table)
