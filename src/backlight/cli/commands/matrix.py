"""``backlight matrix``: run a matrix of controlled cases and evaluate them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("matrix", "Diagnose", extra=True)
def matrix(
    context: Context,
    plan: Annotated[Path, Argument(metavar="PLAN.toml", help="Plan file.")],
    init: Annotated[bool, Option("--init", help="Write a plan for a script and its arguments.")] = False,
    check: Annotated[bool, Option("--check", help="Check the plan and list its cases only.")] = False,
    out: Annotated[Path | None, Option(help="Directory of the matrix; default runs/matrix-<plan>.")] = None,
    only: Annotated[list[str] | None, Option(help="Case to run (repeatable).")] = None,
    again: Annotated[list[str] | None, Option(help="Case to run again (repeatable).")] = None,
    as_json: Json = False,
    bundle: Annotated[Path | None, Option(help="Archive to write, FILE.tar.gz or FILE.zip.")] = None,
    fail_on: Annotated[str | None, Option(help="Verdicts that exit with 1, separated by commas.")] = None,
) -> int:
    """Run controlled cases, collect evidence and evaluate each one.

    An interrupted matrix resumes. With --init it writes a plan:
    backlight matrix --init PLAN.toml -- train.py --lr 3
    """
    from backlight.cli.render.matrix import print_cases, print_report, result_line
    from backlight.diagnose.matrix.evaluation import read_verdicts
    from backlight.diagnose.matrix.plan import PlanError, write_plan
    from backlight.diagnose.matrix.report import REPORTS, write_bundle, write_reports
    from backlight.diagnose.matrix.runner import execute, prepare
    from backlight.store.export.archive import check_archive

    if init:
        print(write_plan(plan, context.args))
        return 0
    if context.args:
        raise PlanError(
            f"unexpected {context.args[0]!r}: a script is only taken with --init, the plan names its own"
        )
    failing = read_verdicts(fail_on) if fail_on is not None else ()
    if bundle is not None:
        check_archive(bundle)
    prepared = prepare(plan)
    console = make_console(stderr=as_json)
    if check:
        print_cases(prepared.cases, console)
        return 0
    folder = out if out is not None else Path("runs") / f"matrix-{plan.stem}"
    report = execute(
        prepared, folder, only=only or (), again=again or (),
        on_start=lambda case: console.print(f"{case.name} ...", style="dim"),
        on_end=lambda one: console.print(result_line(one), soft_wrap=True),
    )  # fmt: skip
    _, page = write_reports(folder)
    if as_json:
        print(REPORTS.dump_json(report, indent=2).decode())
    else:
        print_report(report, console)
        console.print(f"report: {page}", soft_wrap=True)
    if bundle is not None:
        print(write_bundle(folder, bundle), file=sys.stderr if as_json else sys.stdout)
    return int(any(case.evaluation.verdict in failing for case in report.cases))
