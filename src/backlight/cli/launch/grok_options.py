"""Options that the commands of ``backlight grok`` share, and what they make of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from backlight.experiments.config import Configuration

NAME = typer.Argument(metavar="NAME", help="An experiment, see backlight grok list.")
PRESET = typer.Option(
    "--preset", help="ci (the default): seconds to minutes on one core; paper: as published."
)
CONFIG = typer.Option("--config", help="A YAML file, as backlight grok config prints it.")
SET = typer.Option("--set", metavar="KEY=VALUE", help="Set a key: training.lr=0.001; again for more.")
STEPS = typer.Option("--steps", min=1, help="Train so many steps.")
SEED = typer.Option("--seed", help="Seed of data, weights and batches.")
DEVICE = typer.Option("--device", help="cpu, cuda, cuda:1, ...")


def overlay(
    changes: list[str] | None,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    control: str | None = None,
) -> tuple[str, Mapping[str, Any]]:
    """Return what the options of a command line say, as a layer of a configuration."""
    from backlight.experiments.config import assigned

    values = assigned(changes or ())
    if steps is not None:
        values.setdefault("training", {})["steps"] = steps
    given = {"seed": seed, "device": device, "control": control}
    return "--set", values | {key: value for key, value in given.items() if value is not None}


def configured(
    name: str | None, preset: str | None, config: Path | None, options: tuple[str, Mapping[str, Any]]
) -> Configuration:
    """Return the configuration of a preset, a file and options, the later ones winning."""
    from backlight.experiments.config import configure, read

    layers = [] if config is None else [(str(config), read(config))]
    return configure(name, preset, *layers, options)
