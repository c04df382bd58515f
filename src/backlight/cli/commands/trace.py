"""``backlight trace``: where the time of an existing trace went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces of torch.profiler, .json or .json.gz; one per rank."),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Only this step, by its number in ProfilerStep#N.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of each table.")] = 12,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object with all rows; times in ns.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write what is printed to this .html or .md file.")
    ] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="Keep the events as Parquet beside each file, to reopen it at once."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Decoding processes; by default up to 4 for large files."),
    ] = None,
) -> int:
    """Show where the time of a trace went: steps, idle time and its causes, operators, copies, ranks."""
    from backlight.cli.render.trace import print_analysis, save_page
    from backlight.records import to_json
    from backlight.trace.analysis import analyse
    from backlight.trace.cache import open_trace
    from backlight.trace.reader import default_workers

    traces = [open_trace(f, cache=cache, workers=workers or default_workers(f)) for f in files]
    analysis = analyse(traces, step=step)
    if as_json:
        print(json.dumps({"unit": "ns", **to_json(analysis)}, indent=2))
    else:
        print_analysis(analysis, Console(), top)
    if out is not None:
        save_page(analysis, out, top)
        Console(stderr=True).print(f"written: {out}", soft_wrap=True, highlight=False, markup=False)
    return 0


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("trace")(trace)
