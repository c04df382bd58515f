"""Commands of the group Runs: what can be done with stored runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from backlight.cli.app import command
from backlight.cli.console import count_bar, print_answer, print_json
from backlight.cli.options import (
    PATH,
    RUNS,
    Annotation,
    format_option,
    full_option,
    given_or_latest,
    json_option,
    overwrite_option,
    own_run,
    raw_option,
    readable_run,
    run_argument,
    run_or_latest,
    tables_option,
)
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from backlight.store.read.run import Run as RunReader


def listed_folder(text: str) -> Path:
    """Return a directory of runs; behind a URL, a copy with what a list needs, or a RunFormatError."""
    from backlight.store.read.run_list import is_listed

    return readable_run(text, is_listed)


@command("ls", "backlight ls", "backlight ls /scratch/runs --json")
@click.argument(
    "folder", default=RUNS, type=listed_folder, metavar="[DIR]", help="Directory of runs, or its URL."
)
@json_option
def ls(*, folder: Path, as_json: bool) -> None:
    """List the runs of a directory, the newest first.

    The loss is the last one logged, with what it is where one step has several. Findings are those stored
    while the run was watched; none: checked, nothing found; -: not checked.
    """
    from backlight.analysis.run_table import answer
    from backlight.store.read.run_list import list_runs

    print_answer(answer(list_runs(folder)), as_json=as_json, full=True)


@command(
    "findings", "backlight findings", "backlight findings runs/first --fail-on error,spike",
    "backlight findings runs/first --samples 120", "backlight findings --format sarif",
    'backlight findings --accept trained_tensors "head.*" --reason "trained later"',
)  # fmt: skip
@run_or_latest
@json_option
@full_option
@click.option("--hints", is_flag=True, help="Print the hints instead of the findings.")
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Print the samples that carry this step instead.",
)
@format_option
@click.option("--fail-on", metavar="NAME,...", help="Exit 1 for these severities and rules, as error,spike.")
@click.option(
    "--accept", nargs=2, metavar="RULE SUBJECT", help="Finding to accept in pyproject.toml; * is any subject."
)
@click.option("--reason", metavar="TEXT", help="Why, with --accept.")
def findings(
    *,
    path: Path | None,
    as_json: bool,
    full: bool,
    hints: bool,
    samples: int | None,
    annotation: Annotation | None,
    fail_on: str | None,
    accept: tuple[str, str] | None,
    reason: str | None,
) -> int:
    """Print the findings of a run, and count its hints.

    With --format, findings selected by --fail-on (default: error) are marked as failures. Findings that the
    pyproject.toml of the project accepts (--accept) fail nothing, and are printed with the reason. --accept
    check PROBE accepts that a probe of `backlight check` fails.
    """
    from backlight.findings.accepted import CHECK, accept_probe, acceptances
    from backlight.findings.accepted import accept as add_acceptance
    from backlight.findings.evaluate import findings_of, parse_fail_on
    from backlight.report.terminal import print_findings
    from backlight.store.read.run import open_run
    from backlight.text import count

    if as_json and annotation is not None:
        raise click.BadParameter("--json and --format exclude one another")
    failing = parse_fail_on(fail_on) if fail_on is not None else None
    if (accept is None) != (reason is None):
        raise click.BadParameter(
            '--accept and --reason belong together: --accept RULE SUBJECT --reason "..."'
        )
    acceptances()  # what cannot be read is an error here
    if accept is not None and reason is not None and accept[0] == CHECK:
        from backlight.diagnose.probes.result import Probe

        write(f"{accept_probe(accept[1], list(Probe), reason)}: accepts that the probe {accept[1]} fails")
        return 0
    run = open_run(given_or_latest(path))
    if accept is not None and reason is not None:
        file, covered = add_acceptance(findings_of(run), *accept, reason)
        write(f"{file}: accepts {count(covered, 'finding')}")
        return 0
    if samples is not None:
        if annotation is not None or fail_on is not None:
            raise click.BadParameter("--samples excludes --format and --fail-on")
        from backlight.monitors.health.panels.samples import answer

        reply = answer(run, samples)
        print_answer(reply, as_json=as_json, full=True)
        return 0
    listed = findings_of(run)
    if as_json:
        from backlight.report.source import Source
        from backlight.report.verdict import outcome

        summary = outcome(Source(run, tuple(listed)))
        print_json(
            {
                "verdict": summary.tally,
                "lacks": run.shortfall,
                "findings": listed,
                "withdrawn": summary.withdrawn,
            }
        )
    elif annotation is not None:
        from backlight.report.annotations import render_annotations

        write(render_annotations(annotation, run, listed, failing or parse_fail_on("error")))
    else:
        print_findings(run, listed, make_console(), full=full, hints=hints)
    return int(failing is not None and any(map(failing, listed)))


@command("explain", "backlight explain gradients_not_cleared", "backlight explain")
@click.argument(
    "rule", required=False, metavar="[RULE]", help="Rule, as a finding names it; default: list them."
)
def explain(*, rule: str | None) -> None:
    """Print the page of a rule: symptom, cause, fix, and its limits."""
    from backlight.cli.console import Page
    from backlight.findings.pages import page_lines, summary
    from backlight.registry import RULES
    from backlight.text import did_you_mean

    page = Page()
    if rule is None:
        width = max(map(len, RULES))
        for name in RULES:
            page.sentence((f"{name:<{width}}", "bold"), f"  {summary(name)}", indent=width + 2)
        return
    name = rule.replace(" ", "_").replace("-", "_")
    if name not in RULES:
        raise ValueError(f"explain: no rule is called {rule!r}{did_you_mean(name, RULES)}")
    for line, is_heading in page_lines(name):
        page.sentence((line, "bold" if is_heading else ""), indent=2 if line.startswith("- ") else 0)


Table = Literal[
    "parameters", "spectra", "gradient", "update", "histogram", "steps", "scalars", "events", "findings",
    "parameter-table", "attempts", "all",
]  # fmt: skip


@command(
    "export", "backlight export curves.csv", "backlight export runs/first run.h5",
    "backlight export --tracker tensorboard=logs",
)  # fmt: skip
@run_or_latest
@click.argument(
    "target", required=False, type=PATH, metavar="[FILE]", help="File to write: .csv, .parquet or .h5."
)
@click.option(
    "--tracker", multiple=True, metavar="NAME[=TARGET]", help="Tracker, as tensorboard=logs (repeatable)."
)
@overwrite_option
@click.option(
    "--table",
    type=click.Choice(get_args(Table)),
    metavar="NAME",
    help="Table to export, or all; default: what the run holds.",
)
@click.option("--max-directions", metavar="N", type=int, help="Maximum directions of a layer at a step.")
@raw_option
def export(
    *,
    path: Path | None,
    target: Path | None,
    tracker: Sequence[str],
    overwrite: bool,
    table: Table | None,
    max_directions: int | None,
    raw: bool,
) -> None:
    """Export a run to CSV, Parquet or HDF5, or to a tracker."""
    from backlight.findings.evaluate import findings_of
    from backlight.session.trackers.metrics import send_all
    from backlight.store.export import export as export_run
    from backlight.store.read.run import open_run
    from backlight.text import count

    if path is not None and target is None and not path.is_dir() and path.suffix:
        path, target = None, path
    if target is None and not tracker:
        raise click.BadParameter("name a FILE to write, or a tracker with --tracker NAME=TARGET")
    run = open_run(given_or_latest(path))
    for sent in send_all(run, tracker):
        write(f"{sent.tracker}: {count(sent.steps, 'step')}, {count(sent.findings, 'finding')}")
    if target is None:
        return
    made = export_run(
        run, target, table, findings=lambda: findings_of(run), max_directions=max_directions,
        overwrite=overwrite, raw=raw,
    )  # fmt: skip
    write(*made, sep="\n")


@command(
    "compare", "backlight compare runs/first runs/second",
    "backlight compare runs/first runs/second -o cmp.html",
    "backlight compare runs/new --against runs/good",
    "backlight compare runs/a runs/b --align -o curves.html",
    "backlight compare --ab 'python train.py' 'python train.py --fused'",
)  # fmt: skip
@click.argument(
    "runs",
    nargs=-1,
    type=readable_run,
    metavar="[RUN...]",
    help="Two or more runs; the first is A, the reference.",
)
@click.option(
    "--against",
    multiple=True,
    type=readable_run,
    metavar="GOOD",
    help="Good run whose facts one run is checked against (repeatable).",
)
@click.option("--out", "-o", type=PATH, metavar="FILE", help="HTML file to write.")
@click.option("--align", is_flag=True, help="Overlay measures, with steps counted from generalisation.")
@click.option(
    "--measure", multiple=True, metavar="PREFIX", help="Overlay measures of these names (repeatable)."
)
@click.option("--strict", is_flag=True, help="Refuse runs whose configurations differ.")
@click.option("--factor", metavar="NAME", help="Argument or field that may differ, with --strict.")
@click.option("--ab", nargs=2, metavar="COMMAND COMMAND", help="Two commands to run interleaved.")
@click.option("--pairs", default=6, metavar="N", type=click.IntRange(min=3), help="Pairs of runs, with --ab.")
@click.option(
    "--steps",
    default=60,
    metavar="N",
    type=click.IntRange(min=12),
    help="Optimizer steps after which a run is ended, with --ab.",
)
@click.option(
    "--limit",
    default=600.0,
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Time limit of a run, with --ab.",
)
@json_option
@tables_option
def compare(
    *,
    runs: Sequence[Path],
    against: Sequence[Path],
    out: Path | None,
    align: bool,
    measure: Sequence[str],
    strict: bool,
    factor: str | None,
    ab: tuple[str, str] | None,
    pairs: int,
    steps: int,
    limit: float,
    as_json: bool,
    full: bool,
) -> int:
    """Compare runs, or the step times of two commands.

    Prints final and best loss, what differs in the configurations, findings and step times. --ab runs two
    commands interleaved and compares their step times. --measure and --align overlay recorded measures, by
    step, or by step from the generalisation of each run. --against checks what held in good runs (parameters
    with gradients, calls, modes, inputs, losses, norms), and the exit code is 1 where one does not hold.
    """
    if against:
        if ab is not None or align or measure or strict or out is not None:
            raise click.BadParameter("--against excludes --ab, --align, --measure, --strict and --out")
        return _check_against(against, runs, as_json=as_json, full=full)
    if ab is not None:
        return _alternate(ab, pairs, steps, limit, has_runs=bool(runs), as_json=as_json, full=full)
    if factor is not None and not strict:
        raise click.BadParameter("--factor names what may differ under --strict: add --strict")
    if len(runs) < 2:
        raise ValueError(f"expected two runs or more, or --ab with two commands; got {len(runs)}")
    from backlight.analysis.compare import compare as compare_runs
    from backlight.analysis.comparison_answer import answer
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    if align or measure:
        return _overlay(opened, measure, out, align=align, as_json=as_json)
    comparison = compare_runs(opened, strict=strict, factor=factor)
    print_answer(answer(comparison), as_json=as_json, full=full)
    if out is not None:
        from backlight.analysis.comparison_answer import write_comparison

        write(write_comparison(comparison, opened, out), file=sys.stderr if as_json else sys.stdout)
    return 0


def _check_against(good: Sequence[Path], runs: Sequence[Path], *, as_json: bool, full: bool) -> int:
    from backlight.analysis.reference import answer, compare_with
    from backlight.store.read.run import open_run

    if len(runs) != 1:
        raise ValueError(f"expected one run to check with --against, got {len(runs)}")
    reference = compare_with([open_run(path) for path in good], open_run(runs[0]))
    print_answer(answer(reference), as_json=as_json, full=full)
    return int(bool(reference.contradicted))


def _overlay(
    runs: Sequence[RunReader], measures: Sequence[str], out: Path | None, *, align: bool, as_json: bool
) -> int:
    from backlight.analysis.overlay import answer, overlay, write_overlay

    overlaid = overlay(runs, align=align, only=measures)
    print_answer(answer(overlaid), as_json=as_json, full=True)
    if out is not None:
        write(write_overlay(overlaid, out), file=sys.stderr if as_json else sys.stdout)
    return 0


def _alternate(
    commands: tuple[str, str],
    rounds: int,
    steps: int,
    limit: float,
    *,
    has_runs: bool,
    as_json: bool,
    full: bool,
) -> int:
    from backlight.analysis.ab_test import run_ab_test
    from backlight.analysis.comparison_answer import ab_answer

    if has_runs:
        raise ValueError("--ab takes two commands and no runs: leave out the runs, or --ab")
    with count_bar("runs", quiet=as_json) as bar:
        result = run_ab_test(commands, rounds=rounds, steps=steps, limit=limit, on_run=bar)
    print_answer(ab_answer(result), as_json=as_json, full=full)
    return 0


@command(
    "query",
    "backlight query --tables",
    'backlight query "select parameter, max(norm) from gradient group by all"',
    'backlight query runs/first "select * from findings" -o findings.csv',
)
@run_or_latest
@click.argument("statement", required=False, metavar="[SQL]", help="One SELECT statement of DuckDB.")
@click.option("--tables", is_flag=True, help="List tables and columns with their units.")
@json_option
@click.option("as_csv", "--csv", is_flag=True, help="Print CSV.")
@click.option("--out", "-o", type=PATH, metavar="FILE", help="File for all rows, .parquet or .csv.")
@overwrite_option
@click.option(
    "--rows", default=50, metavar="N", type=click.IntRange(min=1), help="Maximum rows of a printed table."
)
@raw_option
def query(
    *,
    path: Path | None,
    statement: str | None,
    tables: bool,
    as_json: bool,
    as_csv: bool,
    out: Path | None,
    overwrite: bool,
    rows: int,
    raw: bool,
) -> None:
    """Query a run with SQL.

    Series, scalars, events, findings and parameters are tables. The statement can read this run only, and
    write nothing.
    """
    from backlight.analysis import sql
    from backlight.store.read.run import open_run

    if path is not None and statement is None and not tables and not path.is_dir():
        path, statement = None, str(path)
    if (statement is None) != tables:
        raise click.BadParameter("give one SELECT, or --tables for what it can ask about")
    if as_json + as_csv + (out is not None) > 1:
        raise click.BadParameter("--json, --csv and --out exclude one another")
    run = open_run(given_or_latest(path))
    if statement is None:
        print_answer(sql.tables_answer(run), as_json=as_json, full=True)
        return
    with sql.query(run, statement) as answer:
        if out is not None:
            write(sql.write(answer, out, overwrite=overwrite, raw=raw))
        elif as_csv:
            sql.print_csv(answer, sys.stdout, raw=raw)
        elif as_json:
            listed = [dict(zip(answer.names, row, strict=True)) for row in answer.rows()]
            print_json(listed)
        else:
            print_answer(answer.answer(rows), as_json=False, full=True)


@command("compact", "backlight compact runs/first --keep-every 10")
@run_argument
@click.option(
    "--keep-every",
    metavar="N",
    type=click.IntRange(min=1),
    help="Recorded steps of which one is kept; default: keep all.",
)
@click.option("--force", is_flag=True, help="Compact although the writer may still run.")
def compact(*, path: Path, keep_every: int | None, force: bool) -> None:
    """Repair and compact a run directory."""
    from backlight.store.write.compact import compact as tidy
    from backlight.text import size

    with count_bar("reading ranks") as advance:
        done = tidy(path, every=keep_every, force=force, advance=advance)
    write(f"{size(done.before)} before, {size(done.after)} after")
    for line in done.notes:
        write(line)


@command("join", "backlight join runs/job runs/job-host2 runs/job-host3")
@click.argument("run", type=own_run, metavar="RUN", help="Run of rank 0.")
@click.argument(
    "parts",
    nargs=-1,
    required=True,
    type=own_run,
    metavar="PART...",
    help="Directories that other hosts wrote.",
)
def join(*, run: Path, parts: Sequence[Path]) -> None:
    """Merge what hosts without a shared file system recorded.

    Copies the ranks into the run of rank 0; the parts stay as they are.
    """
    from backlight.store.write.compact import merge_hosts

    joined = merge_hosts(run, parts)
    for attempt, ranks in sorted(joined.ranks.items()):
        write(f"attempt {attempt}: ranks {', '.join(map(str, sorted(ranks)))}")
    write(f"{joined.files} files copied into {run}" if joined.files else f"{run} holds all of it already")


@command("mcp", "backlight mcp", "backlight mcp /scratch/runs")
@click.argument("folder", default=RUNS, type=PATH, metavar="[DIR]", help="Directory of runs.")
def mcp(*, folder: Path) -> None:
    """Serve runs to coding assistants, read-only, over MCP on stdio.

    The assistant starts this command itself; it can read the runs of DIR and nothing else.
    """
    from backlight.analysis.mcp_server import serve

    serve(folder)
