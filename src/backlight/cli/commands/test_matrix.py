"""``backlight test-matrix``: controlled cases, and the report on them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from backlight.cli.app import command
from backlight.cli.console import Page, print_answer
from backlight.cli.options import PATH, json_option, parse_fail_on
from backlight.records import DiagnosisKind
from backlight.terminal import write
from backlight.text import visible

if TYPE_CHECKING:
    from backlight.diagnose.test_matrix.evaluation import CaseResult
    from backlight.diagnose.test_matrix.plan import Case

_COLOURS = {DiagnosisKind.PASS: "green"} | dict.fromkeys(
    (DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.SLOW), "yellow"
)


@command(
    "test-matrix", "backlight test-matrix --init plan.toml", "backlight test-matrix plan.toml --check",
    "backlight test-matrix plan.toml --fail-on CRASH,BLOCKED",
)  # fmt: skip
@click.argument("plan", type=PATH, metavar="PLAN.toml", help="Plan file.")
@click.option("--init", is_flag=True, help="Write a plan to adapt.")
@click.option("--check", is_flag=True, help="Check the plan and list its cases only.")
@click.option(
    "--out", "-o", type=PATH, metavar="DIR", help="Directory of results; default runs/test-matrix-<plan>."
)
@click.option("--again", multiple=True, metavar="CASE", help="Case to run again (repeatable).")
@json_option
@click.option("--bundle", type=PATH, metavar="FILE", help="Archive to write: .tar.gz or .zip.")
@click.option("--fail-on", metavar="VERDICT,...", help="Exit 1 for cases with these verdicts.")
def run_test_matrix(
    *,
    plan: Path,
    init: bool,
    check: bool,
    out: Path | None,
    again: Sequence[str],
    as_json: bool,
    bundle: Path | None,
    fail_on: str | None,
) -> int:
    """Run controlled cases, collect evidence and evaluate each one.

    An interrupted test matrix resumes.
    """
    from backlight.diagnose.test_matrix.plan import write_plan
    from backlight.diagnose.test_matrix.report import answer, write_bundle, write_report
    from backlight.diagnose.test_matrix.runner import execute, prepare
    from backlight.store.export import check_archive

    if init:
        write_plan(plan)
        write(plan)
        return 0
    failing = parse_fail_on(fail_on, [kind for kind in DiagnosisKind if kind is not DiagnosisKind.PASS])
    if bundle is not None:
        check_archive(bundle)
    prepared = prepare(plan)
    page = Page(errors=as_json)
    if check:
        _print_cases(page, prepared.cases)
        return 0
    folder = out if out is not None else Path("runs") / f"test-matrix-{plan.stem}"
    report = execute(
        prepared, folder, again=again,
        on_start=lambda case: page.say((f"{case.name} ...", "dim")),
        on_end=lambda result: _print_result(page, result),
    )  # fmt: skip
    write_report(folder, folder / "report.md")
    html = write_report(folder, folder / "report.html")
    print_answer(answer(report, full=False), as_json=as_json, full=True)
    if not as_json:
        page.say(f"report: {html}")
    if bundle is not None:
        write(write_bundle(folder, bundle), file=sys.stderr if as_json else sys.stdout)
    return int(any(case.evaluation.verdict in failing for case in report.cases))


def _print_result(page: Page, result: CaseResult) -> None:
    """Print the line for a finished case: ``BLOCKED  case  12.0 s  claim``."""
    evaluation = result.evaluation
    words = f"{visible(result.case.name)}  {result.observation.seconds:.1f} s  {visible(evaluation.claim)}"
    verdict = f"{evaluation.verdict.value:<15}", _COLOURS.get(evaluation.verdict, "red")
    page.sentence(verdict, words, indent=15)


def _print_cases(page: Page, cases: Sequence[Case]) -> None:
    """Print what a plan would run, and in which factor each case differs from its control."""
    for case in cases:
        against = f", {visible(case.factor)} against {visible(case.control)}" if case.control else ""
        page.sentence((visible(case.name), "bold"), f"{against}, at most {case.time_limit:g} s")
        page.sentence(f"    {visible(shlex.join(case.argv))}", indent=6)
