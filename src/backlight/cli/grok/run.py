"""``backlight grok run``: run an experiment or a sweep of it, here or on a cluster; go on with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.launch.grok_options import CONFIG, DEVICE, NAME, PRESET, SEED, SET, STEPS, overlay


def run(
    name: Annotated[str | None, NAME] = None,
    preset: Annotated[str | None, PRESET] = None,
    config: Annotated[Path | None, CONFIG] = None,
    changes: Annotated[list[str] | None, SET] = None,
    steps: Annotated[int | None, STEPS] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; without it runs/NAME-PRESET-seed-N.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, to the same numbers.")
    ] = False,
    control: Annotated[
        str | None,
        typer.Option("--control", help="random-labels: run the matched control as well, beside the run."),
    ] = None,
    degrade: Annotated[
        bool, typer.Option("--degrade", help="Keep less, without asking, where all does not fit.")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="One run for each seed: 0-4 or 0,1,7; folders below --out.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=V,V", help="One run for each value; again for more keys."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs side by side; without it as cores allow.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="KEY=VALUE", help="Submit: partition=gpu; cluster=local runs here."),
    ] = None,
    slurm_script: Annotated[
        Path | None, typer.Option("--slurm-script", help="Write the batch script instead of submitting.")
    ] = None,
) -> int:
    """Run an experiment into a run directory: losses, accuracies, progress measures, geometry of gradients.

    Interrupted by Ctrl-C or killed, it goes on with --resume to the same numbers. Before it starts, what it
    takes is compared with what is free.
    """
    from backlight.cli.launch import grok

    asked = grok.Asked(
        name=name,
        preset=preset,
        config=config,
        options=overlay(changes, steps=steps, seed=seed, device=device),
        out=out,
        control=control or "",
        degrade=degrade,
    )
    if seeds is not None or sweep:
        return grok.sweep(asked, seeds, sweep or [], jobs, slurm, slurm_script)
    if slurm is not None or slurm_script is not None:
        return grok.submit(asked, slurm or [], slurm_script)
    return grok.here(asked, resume=resume)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(run)
