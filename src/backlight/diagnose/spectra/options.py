"""Options of ``backlight spectra``, and its progress."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from backlight import devices
from backlight.distributed import world
from backlight.measure.spectra.decomposition import Method
from backlight.monitors.spectra.settings import SpectraError
from backlight.store.read.run import open_run
from backlight.store.spectra import layers, tables

BUDGET_BYTES = 2 * 10**9
"""Bytes of replicates on a rank, by default."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class SpectraRequest:
    """Options of a measurement; the fields are those of ``backlight spectra``."""

    recipe: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()
    replicates: int = 16
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    method: str = "auto"
    max_directions: int | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    budget: int = BUDGET_BYTES
    out: Path | None = None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Type of model and floating inputs, None as the recipe has them."""
        return None if self.dtype is None else DTYPES[self.dtype]

    def check(self) -> None:
        """Raise SpectraError for options that cannot be used."""
        if self.method not in get_args(Method):
            raise SpectraError(f"--method {self.method}: expected one of {', '.join(get_args(Method))}")
        if self.replicates < 3:
            raise SpectraError(f"--replicates {self.replicates}: at least 3 are needed, 8 or more are better")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SpectraError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")

    def find_device(self) -> torch.device | None:
        """Return a usable device, by default an accelerator if there is one; None for that of the recipe."""
        name = self.device or devices.kind()
        if name is None:
            return None
        try:
            device = torch.device(name)
            if name == devices.kind():
                local = world().local_rank
                device = torch.device(name, local % max(1, devices.count()))
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).strip().splitlines()[0]
            raise SpectraError(f"--device {name}: cannot be used here: {first}") from error
        return device


@dataclass(frozen=True)
class SpectraProgress:
    """Progress of a measurement: ``done`` of ``total`` layers over all checkpoints, and the current work."""

    done: int
    total: int
    text: str


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
    paths_in_order: dict[Path, None] = {}
    for pattern in patterns:
        matched = glob.glob(pattern, recursive=True)  # noqa: PTH207 - pathlib refuses absolute patterns
        if not matched:
            raise ValueError(f"--checkpoints {pattern!r} matches no file in {Path.cwd()}")
        paths_in_order.update(dict.fromkeys(Path(name) for name in matched))
    paths = sorted(paths_in_order, key=lambda path: _natural(str(path)))
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
    configurations = [event.payload for event in run.events(CONFIGURATION)]
    if not configurations:
        if run.attempts and run.last_step() < 0 and not run.events():
            return Earlier()  # killed before it had written anything
        raise SpectraError(f"{path}: is a run of something else; choose another --out")
    for payload in configurations:
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
