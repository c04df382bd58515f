"""What a run directory says of spectra that were measured into it before: how, of what, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight.monitors.spectra.model.errors import SpectraError
from backlight.monitors.spectra.model.reader import layers, tables
from backlight.store.read.run import open_run

CONFIGURATION, CHECKPOINT = "spectra_configuration", "spectra_checkpoint"
"""Kinds of events: with what options an attempt measures, and of what weights a step is."""

_OPTIONS = {
    "recipe": "the recipe",
    "settings": "--set",
    "replicates": "--replicates",
    "method": "--method",
    "max_directions": "--max-directions",
    "device": "--device",
    "dtype": "--dtype",
    "seed": "--seed",
    "data": "the batches of the recipe",
}


@dataclass(frozen=True)
class Earlier:
    """What is in a folder already.

    Attributes
    ----------
    done
        Steps and layers that were measured and whose arrays are there.
    checkpoints
        Path and digest of the weights of each step.
    """

    done: frozenset[tuple[int, str]] = frozenset()
    checkpoints: Mapping[int, tuple[str, str]] = field(default_factory=dict)


def read_earlier(path: Path, configuration: Mapping[str, Any]) -> Earlier:
    """Return what a folder holds of a measurement with the same configuration.

    Raises
    ------
    SpectraError
        If the run there is of something else, or was measured with another configuration.
    """
    if not (path / "manifest.json").is_file():
        return Earlier()
    run = open_run(path)
    known = [event.payload for event in run.events(CONFIGURATION)]
    if not known:
        if len(run.attempts) and not run.last_step() >= 0 and not run.events():
            return Earlier()  # killed before it had written anything
        raise SpectraError(f"{path}: is a run of something else; choose another --out")
    for payload in known:
        other = [name for name in configuration if payload.get(name) != configuration[name]]
        if len(other) > 1:
            other = [name for name in other if name != "data"]  # that follows from the rest
        if other:
            was = "; ".join(_changed(name, payload.get(name), configuration[name]) for name in other)
            raise SpectraError(
                f"{path}: was measured with another configuration ({was}); "
                "use the same again, or choose another --out"
            )
    done = {
        (table.measurement.step, layer.parameter)
        for layer in layers(run)
        for table in tables(run, layer.parameter)
    }
    checkpoints = {
        int(event.step): (str(event.payload["path"]), str(event.payload["weights"]))
        for event in run.events(CHECKPOINT)
        if event.step is not None
    }
    return Earlier(frozenset(done), checkpoints)


def check_checkpoint(path: Path, earlier: Earlier, step: int, file: str, weights: str) -> None:
    """Refuse a step that is of other weights than before.

    Raises
    ------
    SpectraError
        If it is.
    """
    before = earlier.checkpoints.get(step)
    if before is not None and before[1] != weights:
        raise SpectraError(
            f"{path}: step {step} was measured on other weights ({before[0]}) than those of {file}; "
            "choose another --out"
        )


def _changed(name: str, before: Any, now: Any) -> str:
    what = _OPTIONS.get(name, name)
    return f"{what} changed" if name in {"recipe", "data"} else f"{what} was {before}, is {now}"
