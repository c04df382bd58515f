"""``backlight grok``: configurations, costs and diagnoses of experiments on grokking."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from backlight.cli.app import command
from backlight.cli.console import make_table, print_json
from backlight.cli.options import Changes, Device, Json, Preset, Seed, Steps, readable_run
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from backlight.experiments.config import Configuration


def overlay(
    changes: list[str] | None, *, steps: int | None = None, seed: int | None = None, device: str | None = None
) -> tuple[str, Mapping[str, Any]]:
    """Return what the options of a command line say, as a layer of a configuration."""
    from backlight.experiments.config import assigned

    values = assigned(changes or ())
    if steps is not None:
        values.setdefault("training", {})["steps"] = steps
    given = {"seed": seed, "device": device}
    return "--set", values | {key: value for key, value in given.items() if value is not None}


def configured(
    name: str | None, preset: str | None, config: Path | None, options: tuple[str, Mapping[str, Any]]
) -> Configuration:
    """Return the configuration of a preset, a file and options, the later ones winning."""
    from backlight.experiments.config import configure, read

    layers = [] if config is None else [(str(config), read(config))]
    return configure(name, preset, *layers, options)


@command("list", "backlight grok list", group="grok")
def listing(as_json: Json = False) -> None:
    """List the experiments with their sources and effects."""
    from backlight.experiments.experiment import EXPERIMENTS

    found = [
        {
            "name": name, "title": one.title, "arxiv": one.paper.arxiv, "paper": one.paper.title,
            "claim": one.paper.claim, "unclear": one.paper.unclear, "effect": one.effect,
            "expects": one.expects, "ci_expects": one.ci_expects,
        }
        for name, one in EXPERIMENTS.items()
    ]  # fmt: skip
    if as_json:
        print_json(found)
        return
    folded = ("experiment", "effect")
    table = make_table("name", "experiment", "arXiv", "effect", "expects", "ci", folded=folded)
    for row in found:
        keys = ("name", "title", "arxiv", "effect", "expects", "ci_expects")
        table.add_row(*(row[key] or "-" for key in keys))
    make_console().print(table)


@command("config", "backlight grok config nanda --preset paper", group="grok")
def config(
    name: Annotated[str, Argument(metavar="NAME", help="Experiment, see backlight grok list.")],
    preset: Preset = None,
    changes: Changes = None,
    steps: Steps = None,
    seed: Seed = None,
) -> None:
    """Print the configuration of an experiment as YAML."""
    from backlight.experiments.config import configure

    configuration = configure(name, preset, overlay(changes, steps=steps, seed=seed))
    write(configuration.as_yaml().rstrip("\n"))


@command("estimate", "backlight grok estimate nanda", group="grok")
def estimate(
    what: Annotated[str, Argument(metavar="CONFIG|NAME", help="YAML file or name of an experiment.")],
    preset: Preset = None,
    changes: Changes = None,
    steps: Steps = None,
    seed: Seed = None,
    device: Device = None,
    out: Annotated[
        Path, Option("--out", "-o", metavar="DIR", help="Run directory, whose free disk space is checked.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Estimate time, memory and disk of an experiment.

    Times a few steps and each measure.
    """
    from backlight.cli.render.grok import print_estimate
    from backlight.experiments.cost import estimate_of

    file = Path(what)
    named = None if file.suffix in {".yaml", ".yml"} else what
    options = overlay(changes, steps=steps, seed=seed, device=device)
    configuration = configured(named, preset, None if named else file, options)
    console = make_console(stderr=True)
    with console.status("timing") as status:
        found = estimate_of(configuration, out, on_part=lambda part: status.update(f"timing {part}"))
    if as_json:
        print_json(found.as_mapping())
    else:
        print_estimate(found, make_console())


@command("detect", "backlight grok detect runs/nanda-ci-seed-0", group="grok")
def detect(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help="Run directories or URLs.", parser=readable_run)
    ],
    as_json: Json = False,
    control_run: Annotated[
        list[Path] | None,
        Option(metavar="RUN", help="Run directory of a matched control (repeatable).", parser=readable_run),
    ] = None,
    chance: Annotated[float | None, Option(help="Accuracy of guessing; default as recorded.")] = None,
    test_size: Annotated[int | None, Option(help="Number of test samples; default as recorded.")] = None,
) -> int:
    """Diagnose grokking in stored runs.

    Controls and other seeds are found among the given runs and in directories next to each. Exit code 2 if a
    run cannot be evaluated; the others are.
    """
    from backlight.cli.render.grok import print_examined
    from backlight.monitors.grokking.model.analysis import analyse, neighbours
    from backlight.monitors.grokking.model.curves import DetectionError
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    against = [open_run(path) for path in control_run or ()]
    console, out, failed = make_console(), [], False
    for run in opened:
        try:
            found = analyse(
                run, [*opened, *neighbours(run.path)], controls=against, chance=chance, test_size=test_size
            )
        except DetectionError as error:
            failed = True
            out.append({"run": run.location, "error": str(error)})
            write(f"backlight: {error}", file=sys.stderr)
            continue
        out.append(found.as_json())
        if not as_json:
            print_examined(found, console)
    if as_json:
        print_json(out)
    return 2 if failed else 0


@command("compare", "backlight grok compare runs/a runs/b --align -o curves.html", group="grok")
def compare(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Two or more run directories or URLs.", parser=readable_run),
    ],
    align: Annotated[
        bool, Option("--align", help="Count steps of each run from its generalisation.")
    ] = False,
    measure: Annotated[
        list[str] | None, Option(metavar="PREFIX", help="Measures to show (repeatable).")
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", help="HTML file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Overlay measures of several runs by step or generalisation."""
    from backlight.analysis.overlay import as_page, overlay
    from backlight.cli.render.grok import print_overlaid
    from backlight.report.overlay import write_overlay
    from backlight.store.read.run import open_run

    overlaid = overlay([open_run(path) for path in runs], align=align, only=measure or ())
    if as_json:
        print_json(overlaid.as_json())
    else:
        print_overlaid(overlaid, make_console())
    if out is not None:
        written = write_overlay(as_page(overlaid), out)
        write(written, file=sys.stderr if as_json else sys.stdout)
