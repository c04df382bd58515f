"""``backlight trace``: where the time of an existing trace went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("trace", "Diagnose")
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces of torch.profiler (.json, .json.gz), one per rank."),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step to analyse, the N of ProfilerStep#N.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of each table.")] = 12,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="File to write, .html or .md.")] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="Keep events as Parquet next to each file."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Decoding processes; default up to 4 for large files."),
    ] = None,
) -> int:
    """Analyse traces of torch.profiler.

    Reports steps, idle time and its causes, operators, copies and ranks.
    """
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
        print_analysis(analysis, make_console(), top)
    if out is not None:
        save_page(analysis, out, top)
        make_console(stderr=True).print(f"written: {out}", soft_wrap=True, highlight=False, markup=False)
    return 0
