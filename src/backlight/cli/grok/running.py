"""``backlight grok run``: run an experiment, or go on with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.grok_options import CONFIG, DEVICE, NAME, PRESET, SEED, SET, STEPS, configured, overlay


def run(
    name: Annotated[str | None, NAME] = None,
    preset: Annotated[str | None, PRESET] = None,
    config: Annotated[Path | None, CONFIG] = None,
    changes: Annotated[list[str] | None, SET] = None,
    steps: Annotated[int | None, STEPS] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder; without it runs/NAME-PRESET-seed-N.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> int:
    """Run an experiment into a run folder: losses, accuracies, progress measures, geometry of gradients.

    Interrupted by Ctrl-C or killed, it goes on with --resume to the same numbers.
    """
    from backlight.cli.grok_progress import Bar
    from backlight.session.experiments import default_folder, resumed, run_experiment

    options = overlay(changes, steps=steps, seed=seed, device=device)
    if resume and out is not None and config is None:
        configuration = resumed(out, ("the command line", {**options[1], **_named(name, preset)}))
    else:
        configuration = configured(name, preset, config, options)
    path = out if out is not None else default_folder(configuration)
    bar = Bar(configuration.experiment)
    try:
        with bar as show:
            run_experiment(configuration, path, resume=resume, on_progress=show, on_warning=bar.warn)
    except KeyboardInterrupt:
        print(f"stopped; go on with: backlight grok run {configuration.experiment} --out {path} --resume")
        return 130
    print(path)
    return 0


def _named(name: str | None, preset: str | None) -> dict[str, str]:
    given = {"experiment": name, "preset": preset}
    return {key: value for key, value in given.items() if value is not None}


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(run)
