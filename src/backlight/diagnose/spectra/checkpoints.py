"""Checkpoints by pattern with the step of each, and what a run directory already holds of their spectra."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight.monitors.spectra.settings import SpectraError
from backlight.store.read.run import open_run
from backlight.store.read.spectra import layers, tables


@dataclass(frozen=True)
class Checkpoint:
    """A state of a model: its file, None for the freshly built model, and its step."""

    path: Path | None
    step: int
    """The last number in the name of the file where those of all files ascend, else its position."""

    def __str__(self) -> str:
        """Return the name in messages."""
        return "the freshly built model" if self.path is None else str(self.path)


def find_checkpoints(patterns: Sequence[str]) -> tuple[Checkpoint, ...]:
    """Return the matching checkpoints in natural order, the freshly built model without a pattern."""
    if not patterns:
        return (Checkpoint(None, 0),)
    found: dict[Path, None] = {}
    for pattern in patterns:
        matched = glob.glob(pattern, recursive=True)  # noqa: PTH207 - pathlib refuses absolute patterns
        if not matched:
            raise ValueError(f"--checkpoints {pattern!r} matches no file in {Path.cwd()}")
        found.update(dict.fromkeys(Path(name) for name in matched))
    paths = sorted(found, key=lambda path: _natural(str(path)))
    last = [re.findall(r"\d+", path.stem) for path in paths]
    numbers = [int(digits[-1]) for digits in last if digits]
    named = len(numbers) == len(paths) and all(a < b for a, b in itertools.pairwise(numbers))
    return tuple(
        Checkpoint(path, numbers[index] if named and numbers[index] < 2**62 else index)
        for index, path in enumerate(paths)
    )


CONFIGURATION, CHECKPOINT = "spectra_configuration", "spectra_checkpoint"
"""Kinds of events: the options of an attempt, and the weights of a step."""

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
    """Measured steps and layers of a run directory, and path and digest of weights by step."""

    done: frozenset[tuple[int, str]] = frozenset()
    checkpoints: Mapping[int, tuple[str, str]] = field(default_factory=dict)


def read_earlier(path: Path, configuration: Mapping[str, Any]) -> Earlier:
    """Return what a run directory holds; SpectraError if it is of something else or other options."""
    if not (path / "manifest.json").is_file():
        return Earlier()
    run = open_run(path)
    known = [event.payload for event in run.events(CONFIGURATION)]
    if not known:
        if run.attempts and run.last_step() < 0 and not run.events():
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


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts digits by their value and everything else as text."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", text) if t]


def _changed(name: str, before: Any, now: Any) -> str:
    what = _OPTIONS.get(name, name)
    return f"{what} changed" if name in {"recipe", "data"} else f"{what} was {before}, is {now}"
