"""``backlight grok config``: the configuration of an experiment as YAML."""

from __future__ import annotations

from typing import Annotated

from backlight.cli.app import command
from backlight.cli.commands.grok.options import NAME, PRESET, SEED, SET, STEPS, overlay


@command("config", group="grok")
def config(
    name: Annotated[str, NAME],
    chosen: Annotated[str | None, PRESET] = None,
    changes: Annotated[list[str] | None, SET] = None,
    steps: Annotated[int | None, STEPS] = None,
    seed: Annotated[int | None, SEED] = None,
) -> None:
    """Print the configuration of an experiment as YAML."""
    from backlight.experiments.config import configure

    configuration = configure(name, chosen, overlay(changes, steps=steps, seed=seed))
    print(configuration.as_yaml(), end="")
