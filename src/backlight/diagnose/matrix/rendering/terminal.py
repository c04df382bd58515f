"""The report on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.evaluation import Judgement
from backlight.diagnose.matrix.rendering.escape import visible
from backlight.diagnose.matrix.report import MatrixReport
from backlight.diagnose.matrix.tree import Standing
from backlight.records import DiagnosisKind

_COLOURS = {
    DiagnosisKind.PASS: "green",
    DiagnosisKind.UNKNOWN: "yellow",
    DiagnosisKind.DID_NOT_FINISH: "yellow",
    DiagnosisKind.SLOW: "yellow",
}
_STANDINGS = {Standing.SUPPORTED: "bold", Standing.REFUTED: "dim", Standing.OPEN: "yellow"}


def one_line(name: str, seconds: float, judgement: Judgement) -> Text:
    """Return what is said when a case is over: ``BLOCKED  case  12.0 s  claim``."""
    verdict = judgement.verdict
    text = Text(f"{verdict.value:<15}", style=_COLOURS.get(verdict, "red"))
    return text.append(f"{visible(name)}  {seconds:.1f} s  {visible(judgement.claim)}", style="default")


def print_report(report: MatrixReport, console: Console) -> None:
    """Print the whole report; nothing of a case or a plan acts on the terminal."""
    console.print()
    console.print(Text(f"{visible(report.name)}: {visible(report.headline)}", style="bold"))
    console.print()
    table = Table(box=None, pad_edge=False)
    for column in ("verdict", "case", "factor", "what"):
        table.add_column(column, overflow="fold")
    for case in report.cases:
        judgement = case.judgement
        table.add_row(
            Text(judgement.verdict.value, style=_COLOURS.get(judgement.verdict, "red")),
            Text(visible(case.name)),
            Text(f"{visible(case.factor)} against {visible(case.control)}" if case.control else ""),
            Text(visible(judgement.claim) + (f" [{visible(judgement.line)}]" if judgement.line else "")),
        )
    console.print(table)
    _section(console, "not run", [Text(visible(name)) for name in report.not_run])
    _section(
        console,
        "against their controls",
        [
            Text(f"{visible(c.claim)}; effect of the knob: {c.effect.value}")
            .append(f" ({visible('; '.join(c.seen))})" if c.seen else "")
            for c in report.comparisons
        ],
    )  # fmt: skip
    _section(
        console,
        "decision tree",
        [
            Text(f"{b.label:<10}", style=_STANDINGS[b.standing])
            .append(visible(b.text), style="default")
            .append(f" ({visible(b.why)})", style="dim")
            for b in report.branches
        ],
    )  # fmt: skip
    _section(
        console,
        "what to do, in this order",
        [
            Text(f"{i}. {visible(a.do)}{f' at {visible(a.at)}' if a.at else ''}: {visible(a.why)}")
            .append(f"\n     verify: {visible(a.verify)}", style="dim")
            for i, a in enumerate(report.actions, 1)
        ],
    )  # fmt: skip
    _section(console, "left open", [Text(visible(text)) for text in report.open])
    lacking = [f"{case.name}: {m.what}: {m.why}" for case in report.cases for m in case.missing]
    _section(console, "evidence that could not be collected", [Text(visible(text)) for text in lacking])


def print_cases(cases: Sequence[Case], console: Console) -> None:
    """Print what a plan would run, and in which factor each case differs from its control."""
    table = Table(box=None, pad_edge=False)
    for column in ("case", "control", "differs in", "limit", "command"):
        table.add_column(column, overflow="fold")
    for case in cases:
        limit = f"{case.launch.time_limit:g} s"
        words = (case.name, case.control, case.factor, limit, shlex.join(case.launch.argv))
        table.add_row(*(Text(visible(word)) for word in words))
    console.print(table)


def _section(console: Console, title: str, lines: list[Text]) -> None:
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Text("  ").append_text(line), soft_wrap=True)
