"""``backlight compare``: compare two runs, or the step times of two commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("compare", "Runs")
def compare(
    first: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Reference run.", show_default=False)
    ] = None,
    second: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run to compare.", show_default=False)
    ] = None,
    factor: Annotated[
        str | None, typer.Option("--factor", help="Argument or field that may differ, as --lr.")
    ] = None,
    ab: Annotated[
        tuple[str, str] | None,
        typer.Option("--ab", help="Two commands to run interleaved."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Pairs of runs, with --ab.")] = 6,
    steps: Annotated[int, typer.Option("--steps", min=12, help="Steps of each run, with --ab.")] = 60,
    limit: Annotated[
        float, typer.Option("--limit", min=1, help="Time limit of a run in seconds, with --ab.")
    ] = 600.0,
    as_json: Json = False,
) -> int:
    """Compare two runs, or the step times of two commands.

    Exit code 1 if the runs are not comparable. With --ab 'COMMAND' 'COMMAND', run both interleaved.

    Raises
    ------
    ValueError
        If there are neither two runs nor two commands.
    """
    if ab is not None:
        return _alternate(ab, rounds, steps, limit, given=first is not None, as_json=as_json)
    if first is None or second is None:
        raise ValueError(
            "expected two runs, or --ab with two commands; got " + (str(first) if first else "none")
        )
    from backlight.analysis.compare import compare as compare_runs
    from backlight.cli.render.comparison import print_comparison
    from backlight.records import to_json
    from backlight.store.read.run import open_run

    one = open_run(first)
    other = open_run(second)
    comparison = compare_runs(one, other, factor=factor)
    if as_json:
        print(json.dumps({"verdict": comparison.verdict, **to_json(comparison)}, indent=2))
    else:
        print_comparison(comparison, make_console())
    return 0 if comparison.comparable else 1


def _alternate(
    commands: tuple[str, str], rounds: int, steps: int, limit: float, *, given: bool, as_json: bool
) -> int:
    from backlight.analysis.ab_test import run_ab_test
    from backlight.cli.render.comparison import Turns, print_ab_test
    from backlight.records import to_json

    if given:
        raise ValueError("--ab takes two commands and no runs: leave out the runs, or --ab")
    with Turns(quiet=as_json) as turns:
        result = run_ab_test(commands, rounds=rounds, steps=steps, limit=limit, on_run=turns)
    if as_json:
        print(json.dumps({"verdict": result.times.verdict, **to_json(result)}, indent=2))
    else:
        print_ab_test(result, make_console())
    return 0
