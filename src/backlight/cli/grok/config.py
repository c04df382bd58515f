"""``backlight grok config``: the configuration of an experiment as YAML."""

from __future__ import annotations

from typing import Annotated

import typer

from backlight.cli.launch.grok_options import NAME, PRESET, SEED, SET, STEPS, overlay


def config(
    name: Annotated[str, NAME],
    chosen: Annotated[str | None, PRESET] = None,
    changes: Annotated[list[str] | None, SET] = None,
    steps: Annotated[int | None, STEPS] = None,
    seed: Annotated[int | None, SEED] = None,
) -> None:
    """Print the whole configuration of an experiment as YAML, for run --config FILE."""
    from backlight.experiments.config import configure

    configuration = configure(name, chosen, overlay(changes, steps=steps, seed=seed))
    print(configuration.as_yaml(), end="")


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("config")(config)
