"""``backlight test-matrix``: run a test matrix of controlled cases and evaluate them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json
from backlight.records import DiagnosisKind


@command("test-matrix", "Diagnose")
def run_test_matrix(
    plan: Annotated[Path, Argument(metavar="PLAN.toml", help="Plan file.")],
    init: Annotated[bool, Option("--init", help="Write a plan to adapt.")] = False,
    check: Annotated[bool, Option("--check", help="Check the plan and list its cases only.")] = False,
    out: Annotated[Path | None, Option(help="Directory of results; default runs/test-matrix-<plan>.")] = None,
    again: Annotated[list[str] | None, Option(help="Case to run again (repeatable).")] = None,
    as_json: Json = False,
    bundle: Annotated[Path | None, Option(help="Archive to write, FILE.tar.gz or FILE.zip.")] = None,
    fail_on: Annotated[
        list[DiagnosisKind] | None, Option(help="Verdict that exits with 1 (repeatable).")
    ] = None,
) -> int:
    """Run controlled cases, collect evidence and evaluate each one.

    An interrupted test matrix resumes.
    """
    from backlight.cli.render.test_matrix import print_cases, print_report, result_line
    from backlight.diagnose.test_matrix.plan import write_plan
    from backlight.diagnose.test_matrix.report import REPORTS, write_bundle, write_report
    from backlight.diagnose.test_matrix.runner import execute, prepare
    from backlight.store.export.archive import check_archive

    if init:
        write_plan(plan)
        print(plan)
        return 0
    if bundle is not None:
        check_archive(bundle)
    prepared = prepare(plan)
    console = make_console(stderr=as_json)
    if check:
        print_cases(prepared.cases, console)
        return 0
    folder = out if out is not None else Path("runs") / f"test-matrix-{plan.stem}"
    report = execute(
        prepared, folder, again=again or (),
        on_start=lambda case: console.print(f"{case.name} ...", style="dim"),
        on_end=lambda one: console.print(result_line(one), soft_wrap=True),
    )  # fmt: skip
    write_report(folder, folder / "report.md", as_html=False)
    page = write_report(folder, folder / "report.html", as_html=True)
    if as_json:
        print(REPORTS.dump_json(report, indent=2).decode())
    else:
        print_report(report, console)
        console.print(f"report: {page}", soft_wrap=True)
    if bundle is not None:
        print(write_bundle(folder, bundle), file=sys.stderr if as_json else sys.stdout)
    return int(any(case.evaluation.verdict in (fail_on or ()) for case in report.cases))
