"""``backlight grok``: configurations, costs and diagnoses of experiments on grokking."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backlight.answer import Answer, Table, word
from backlight.cli.app import command, grok
from backlight.cli.console import print_answer, print_json
from backlight.cli.options import json_option, readable_run
from backlight.terminal import write
from backlight.text import count

if TYPE_CHECKING:
    from backlight.experiments.config import Configuration


def overlay(changes: Sequence[str], seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return what the options of a command line say, as a layer of a configuration."""
    from backlight.experiments.config import assigned

    return "--set", assigned(changes) | ({} if seed is None else {"seed": seed})


def configured(
    name: str | None, preset: str | None, config: Path | None, options: tuple[str, Mapping[str, Any]]
) -> Configuration:
    """Return the configuration of a preset, a file and options, the later ones winning."""
    from backlight.experiments.config import configure, read

    layers = [] if config is None else [(str(config), read(config))]
    return configure(name, preset, *layers, options)


@command("list", "backlight grok list", group=grok)
@json_option
def listing(*, as_json: bool) -> None:
    """List the experiments with their sources and effects."""
    from backlight.experiments.experiment import EXPERIMENTS

    rows = [
        {
            "name": name, "title": entry.title, "arxiv": entry.paper.arxiv, "paper": entry.paper.title,
            "claim": entry.paper.claim, "unclear": entry.paper.unclear, "effect": entry.effect,
            "expects": entry.expects, "ci_expects": entry.ci_expects,
        }
        for name, entry in EXPERIMENTS.items()
    ]  # fmt: skip
    columns = (
        word("name", "name"), word("experiment", "title", "text"), word("arXiv", "arxiv"),
        word("effect", "effect", "text"), word("expects", "expects"),
        word("ci", lambda row: row["ci_expects"] or None),
    )  # fmt: skip
    listed = Answer(
        count(len(rows), "experiment"), {"experiments": rows}, tables=(Table(columns, rows, len(rows)),)
    )
    print_answer(listed, as_json=as_json, full=True)


@command("detect", "backlight grok detect runs/nanda-ci-seed-0", group=grok)
@click.argument(
    "runs", nargs=-1, required=True, type=readable_run, metavar="RUN...", help="Run directories or URLs."
)
@json_option
@click.option(
    "--control-run",
    multiple=True,
    type=readable_run,
    metavar="RUN",
    help="Run directory of a matched control (repeatable).",
)
@click.option("--chance", metavar="X", type=float, help="Accuracy of guessing; default as recorded.")
@click.option("--test-size", metavar="N", type=int, help="Number of test samples; default as recorded.")
def detect(
    *,
    runs: Sequence[Path],
    as_json: bool,
    control_run: Sequence[Path],
    chance: float | None,
    test_size: int | None,
) -> int:
    """Diagnose grokking in stored runs.

    Controls and other seeds are found among the given runs and in directories next to each. Exit code 2 if a
    run cannot be evaluated; the others are.
    """
    from backlight.monitors.grokking.model.analysis import analyse, answer, neighbours
    from backlight.monitors.grokking.model.curves import DetectionError
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    against = [open_run(path) for path in control_run]
    out, failed = [], False
    for run in opened:
        try:
            analysis = analyse(
                run, [*opened, *neighbours(run.path)], controls=against, chance=chance, test_size=test_size
            )
        except DetectionError as error:
            failed = True
            out.append({"run": run.location, "error": str(error)})
            write(f"backlight: {error}", file=sys.stderr)
            continue
        reply = answer(analysis)
        out.append(reply.as_json())
        if not as_json:
            print_answer(reply, as_json=False, full=True)
    if as_json:
        print_json(out)
    return 2 if failed else 0
