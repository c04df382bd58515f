"""Options that the commands of ``backlight grok`` share, and what they make of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from backlight.experiments.config import Configuration

NAME = typer.Argument(metavar="NAME", help="Experiment, see backlight grok list.")
PRESET = typer.Option("--preset", help="Preset: ci (default, up to minutes) or paper.")
CONFIG = typer.Option("--config", help="YAML file, as backlight grok config prints it.")
SET = typer.Option("--set", metavar="KEY=VALUE", help="Configuration key, as training.lr=0.001 (repeatable).")
STEPS = typer.Option("--steps", min=1, help="Training steps.")
SEED = typer.Option("--seed", help="Seed of data, weights and batches.")
DEVICE = typer.Option("--device", help="Device: cpu, cuda, cuda:1.")


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
