"""Commands of the group Runs: what can be done with stored runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from backlight.cli.app import command
from backlight.cli.console import print_json
from backlight.cli.options import (
    RUNS,
    Full,
    Json,
    Overwrite,
    Run,
    RunOrLatest,
    Tables,
    given_or_latest,
    own_run,
    readable_run,
)
from backlight.cli.progress import count_bar
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from backlight.store.read.run import Run as RunReader


def listed_folder(text: str) -> Path:
    """Return a directory of runs; behind a URL, a copy with what a list of them needs.

    Raises
    ------
    RunFormatError
        If the URL cannot be read, or a package for it is missing.
    """
    from backlight.store.read.run_list import is_listed

    return readable_run(text, is_listed)


@command("ls", "backlight ls", "backlight ls /scratch/runs --json")
def ls(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="Directory of runs, or its URL.", parser=listed_folder)
    ] = RUNS,
    as_json: Json = False,
) -> None:
    """List the runs of a directory, the newest first.

    The loss is the last one logged, with what it is where one step has several. Findings are those stored
    while the run was watched; none: checked, nothing found; -: not checked.
    """
    from backlight.cli.render.run_list import print_runs
    from backlight.store.read.run_list import list_runs

    found = list_runs(folder)
    if as_json:
        print_json(found)
    else:
        print_runs(found, make_console())


@command(
    "findings", "backlight findings", "backlight findings runs/first --fail-on error,spike",
    "backlight findings runs/first --samples 120", "backlight findings --format sarif",
)  # fmt: skip
def findings(
    path: RunOrLatest = None,
    as_json: Json = False,
    full: Full = False,
    hints: Annotated[bool, Option("--hints", help="Print the hints instead of the findings.")] = False,
    samples: Annotated[
        int | None, Option(metavar="STEP", min=0, help="Print the samples that carry this step instead.")
    ] = None,
    annotation: Annotated[
        Literal["github", "junit", "sarif"] | None,
        Option("--format", metavar="NAME", help="Annotations of a CI job: github, junit or sarif."),
    ] = None,
    fail_on: Annotated[
        str | None, Option(metavar="NAME,...", help="Exit 1 for these severities and rules, as error,spike.")
    ] = None,
) -> int:
    """Print the findings of a run, and count its hints.

    With --format, findings selected by --fail-on (default: error) are marked as failures.
    """
    from backlight.findings.evaluate import findings_of, parse_fail_on
    from backlight.report.terminal import print_findings
    from backlight.store.read.run import open_run

    if as_json and annotation is not None:
        raise BadParameter("--json and --format exclude one another")
    failing = parse_fail_on(fail_on) if fail_on is not None else None
    run = open_run(given_or_latest(path))
    if samples is not None:
        if annotation is not None or fail_on is not None:
            raise BadParameter("--samples excludes --format and --fail-on")
        from backlight.cli.render.samples import print_samples

        print_samples(run, samples, as_json=as_json)
        return 0
    found = findings_of(run)
    if as_json:
        from backlight.report.source import Source
        from backlight.report.verdict import outcome

        said = outcome(Source(run, tuple(found)))
        print_json(
            {"verdict": said.tally, "lacks": run.shortfall, "findings": found, "withdrawn": said.withdrawn}
        )
    elif annotation is not None:
        from backlight.report.annotations import render_annotations

        write(render_annotations(annotation, run, found, failing or parse_fail_on("error")))
    else:
        print_findings(run, found, make_console(), full=full, hints=hints)
    return int(failing is not None and any(map(failing, found)))


Raw = Annotated[bool, Option("--raw", help="Leave CSV texts that look like formulas as they are.")]

Table = Literal[
    "parameters", "spectra", "gradient", "update", "histogram", "steps", "scalars", "events", "findings",
    "parameter-table", "attempts", "all",
]  # fmt: skip


@command(
    "export", "backlight export curves.csv", "backlight export runs/first run.h5",
    "backlight export --tracker tensorboard=logs",
)  # fmt: skip
def export(
    path: RunOrLatest = None,
    target: Annotated[
        Path | None, Argument(metavar="FILE", help="File to write: .csv, .parquet or .h5.")
    ] = None,
    tracker: Annotated[
        list[str] | None,
        Option(metavar="NAME[=TARGET]", help="Tracker, as tensorboard=logs (repeatable)."),
    ] = None,
    overwrite: Overwrite = False,
    table: Annotated[
        Table | None, Option(metavar="NAME", help="Table to export, or all; default: what the run holds.")
    ] = None,
    max_directions: Annotated[int | None, Option(help="Maximum directions of a layer at a step.")] = None,
    raw: Raw = False,
) -> None:
    """Export a run to CSV, Parquet or HDF5, or to a tracker."""
    from backlight.findings.evaluate import findings_of
    from backlight.session.trackers.metrics import send_all
    from backlight.store.export.files import export as export_run
    from backlight.store.export.files import export_tables
    from backlight.store.read.run import open_run
    from backlight.text import count

    if path is not None and target is None and not path.is_dir() and path.suffix:
        path, target = None, path
    if target is None and not tracker:
        raise BadParameter("name a FILE to write, or a tracker with --tracker NAME=TARGET")
    if table == "all" and max_directions:
        raise BadParameter("--table all is every table: leave --max-directions out")
    run = open_run(given_or_latest(path))
    for sent in send_all(run, tracker or ()):
        write(f"{sent.tracker}: {count(sent.steps, 'step')}, {count(sent.findings, 'finding')}")
    if target is None:
        return
    if table not in {None, "parameters", "spectra"}:
        name = {"all": None, "parameter-table": "parameters"}.get(table, table)
        made = export_tables(
            run, target, name, findings=lambda: findings_of(run), overwrite=overwrite, raw=raw
        )
        write(*made, sep="\n")
        return
    for written in export_run(
        run, target, overwrite=overwrite, rows=table, max_directions=max_directions, raw=raw
    ):
        write(written)


@command(
    "compare", "backlight compare runs/first runs/second",
    "backlight compare runs/first runs/second -o cmp.html",
    "backlight compare runs/a runs/b --align -o curves.html",
    "backlight compare --ab 'python train.py' 'python train.py --fused'",
)  # fmt: skip
def compare(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN...", help="Two or more runs; the first is A, the reference.", parser=readable_run
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", help="HTML file to write.")] = None,
    align: Annotated[
        bool, Option("--align", help="Overlay measures, with steps counted from generalisation.")
    ] = False,
    measure: Annotated[
        list[str] | None, Option(metavar="PREFIX", help="Overlay measures of these names (repeatable).")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Refuse runs whose configurations differ.")] = False,
    factor: Annotated[
        str | None, Option(metavar="NAME", help="Argument or field that may differ, with --strict.")
    ] = None,
    ab: Annotated[
        tuple[str, str] | None, Option(metavar="COMMAND COMMAND", help="Two commands to run interleaved.")
    ] = None,
    pairs: Annotated[int, Option(min=3, help="Pairs of runs, with --ab.")] = 6,
    steps: Annotated[int, Option(min=12, help="Optimizer steps after which a run is ended, with --ab.")] = 60,
    limit: Annotated[float, Option(metavar="SECONDS", min=1, help="Time limit of a run, with --ab.")] = 600.0,
    as_json: Json = False,
    full: Tables = False,
) -> int:
    """Compare runs, or the step times of two commands.

    Prints final and best loss, what differs in the configurations, findings and step times. --ab runs two
    commands interleaved and compares their step times. --measure and --align overlay recorded measures, by
    step, or by step from the generalisation of each run.
    """
    if ab is not None:
        return _alternate(ab, pairs, steps, limit, given=bool(runs), as_json=as_json, full=full)
    if factor is not None and not strict:
        raise BadParameter("--factor names what may differ under --strict: add --strict")
    if not runs or len(runs) < 2:
        raise ValueError(f"expected two runs or more, or --ab with two commands; got {len(runs or [])}")
    from backlight.analysis.compare import compare as compare_runs
    from backlight.analysis.compare import comparison_json
    from backlight.cli.render.comparison import print_comparison
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    if align or measure:
        return _overlay(opened, measure or (), out, align=align, as_json=as_json)
    comparison = compare_runs(opened, strict=strict, factor=factor)
    if as_json:
        print_json(comparison_json(comparison))
    else:
        print_comparison(comparison, make_console(), full=full)
    if out is not None:
        from backlight.analysis.comparison_page import write_comparison

        write(write_comparison(comparison, opened, out), file=sys.stderr if as_json else sys.stdout)
    return 0


def _overlay(
    runs: Sequence[RunReader], measures: Sequence[str], out: Path | None, *, align: bool, as_json: bool
) -> int:
    from backlight.analysis.overlay import as_page, overlay
    from backlight.cli.render.grok import print_overlaid
    from backlight.report.overlay import write_overlay

    overlaid = overlay(runs, align=align, only=measures)
    if as_json:
        print_json(overlaid.as_json())
    else:
        print_overlaid(overlaid, make_console())
    if out is not None:
        write(write_overlay(as_page(overlaid), out), file=sys.stderr if as_json else sys.stdout)
    return 0


def _alternate(
    commands: tuple[str, str],
    rounds: int,
    steps: int,
    limit: float,
    *,
    given: bool,
    as_json: bool,
    full: bool,
) -> int:
    from backlight.analysis.ab_test import run_ab_test
    from backlight.cli.render.comparison import print_ab_test

    if given:
        raise ValueError("--ab takes two commands and no runs: leave out the runs, or --ab")
    with count_bar("runs", quiet=as_json) as bar:
        result = run_ab_test(commands, rounds=rounds, steps=steps, limit=limit, on_run=bar)
    if as_json:
        print_json(result.as_json())
    else:
        print_ab_test(result, make_console(), full=full)
    return 0


@command(
    "query",
    "backlight query --tables",
    'backlight query "select parameter, max(norm) from gradient group by all"',
    'backlight query runs/first "select * from findings" -o findings.csv',
)
def query(
    path: RunOrLatest = None,
    statement: Annotated[str | None, Argument(metavar="SQL", help="One SELECT statement of DuckDB.")] = None,
    tables: Annotated[bool, Option("--tables", help="List tables and columns with their units.")] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE", help="File for all rows, .parquet or .csv.")
    ] = None,
    overwrite: Overwrite = False,
    rows: Annotated[int, Option(min=1, help="Maximum rows of a printed table.")] = 50,
    raw: Raw = False,
) -> None:
    """Query a run with SQL.

    Series, scalars, events, findings and parameters are tables. The statement can read this run only, and
    write nothing.
    """
    from backlight.analysis import sql
    from backlight.cli.render.query import print_rows, print_tables
    from backlight.store.read.run import open_run

    if path is not None and statement is None and not tables and not path.is_dir():
        path, statement = None, str(path)
    if (statement is None) != tables:
        raise BadParameter("give one SELECT, or --tables for what it can ask about")
    if as_json + as_csv + (out is not None) > 1:
        raise BadParameter("--json, --csv and --out exclude one another")
    run = open_run(given_or_latest(path))
    if statement is None:
        print_tables(sql.tables(run), as_json=as_json)
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
            print_rows(answer, rows)


@command("compact", "backlight compact runs/first --keep-every 10")
def compact(
    path: Run,
    keep_every: Annotated[
        int | None, Option(min=1, help="Recorded steps of which one is kept; default: keep all.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Compact although the writer may still run.")] = False,
) -> None:
    """Repair and compact a run directory."""
    from backlight.store.maintenance.compact import compact as tidy
    from backlight.text import size

    with count_bar("reading ranks") as advance:
        done = tidy(path, every=keep_every, force=force, advance=advance)
    write(f"{size(done.before)} before, {size(done.after)} after")
    for line in done.notes:
        write(line)


@command("join", "backlight join runs/job runs/job-host2 runs/job-host3")
def join(
    run: Annotated[Path, Argument(metavar="RUN", help="Run of rank 0.", parser=own_run)],
    parts: Annotated[
        list[Path], Argument(metavar="PART...", help="Directories that other hosts wrote.", parser=own_run)
    ],
) -> None:
    """Merge what hosts without a shared file system recorded.

    Copies the ranks into the run of rank 0; the parts stay as they are.
    """
    from backlight.store.maintenance.merge_hosts import merge_hosts

    joined = merge_hosts(run, parts)
    for attempt, ranks in sorted(joined.ranks.items()):
        write(f"attempt {attempt}: ranks {', '.join(map(str, sorted(ranks)))}")
    write(f"{joined.files} files copied into {run}" if joined.files else f"{run} holds all of it already")


@command("mcp", "backlight mcp", "backlight mcp /scratch/runs")
def mcp(
    folder: Annotated[Path, Argument(metavar="DIR", help="Directory of runs.")] = RUNS,
) -> None:
    """Serve runs to coding assistants, read-only, over MCP on stdio.

    The assistant starts this command itself; it can read the runs of DIR and nothing else.
    """
    from backlight.analysis.mcp_server import serve

    serve(folder)
