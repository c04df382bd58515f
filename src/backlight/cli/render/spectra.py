"""Spectra in print: a bar while they are measured, then a table of layers or one JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from backlight.cli.console import make_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from backlight.diagnose.spectra.options import SpectraProgress
    from backlight.diagnose.spectra.run import SpectraResult
    from backlight.store.format.spectra import Layer, Measurement
    from backlight.store.read.run import Run

SHOWN = 20
"""Layers that are printed; --json has them all."""


@contextmanager
def bar() -> Iterator[Callable[[SpectraProgress], None]]:
    """Give what shows how far a measurement is, on standard error; silent where that is no terminal."""
    console = make_console(stderr=True)
    progress = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = progress.add_task("layers", total=None)

    def show(stage: SpectraProgress) -> None:
        progress.update(task, completed=stage.done, total=stage.total, description=stage.text)

    with progress:
        yield show


def show(outcome: SpectraResult, run: Run) -> None:
    """Print what was measured: the layers of the last step, the largest share of signal first."""
    from backlight.store.read.spectra import layers, measurements

    known = {layer.parameter: layer for layer in layers(run)}
    measured = measurements(run)
    steps = sorted({one.step for one in measured})
    last = [one for one in measured if one.step == steps[-1]] if steps else []
    many = f", {len(steps)} steps, here the last: {steps[-1]}" if len(steps) > 1 else ""
    _say((f"{len(last)} layers, {_count(last)} replicates of {_batch(outcome.batch)}{many}", "bold"))
    _table(known, last)
    for text in notes(outcome):
        _say(("note: ", "dim"), text)
    _say(("next: ", "dim"), f"backlight report {outcome.path}")


def as_object(outcome: SpectraResult, run: Run) -> dict[str, Any]:
    """Return what was measured as JSON types; what was not measured, or is infinite, is null."""
    from backlight.store.read.spectra import layers, measurements

    known = {layer.parameter: layer for layer in layers(run)}
    return {
        "run": str(outcome.path),
        "world_size": outcome.world_size,
        "checkpoints": [
            {"step": one.step, "path": None if one.path is None else str(one.path)}
            for one in outcome.checkpoints
        ],
        "measured": outcome.measured,
        "measured_before": outcome.resumed,
        "sweeps": outcome.sweeps,
        "samples_per_replicate": _finite(outcome.batch),
        "left_out": dict(outcome.left_out),
        "layers": [
            {
                "parameter": one.parameter,
                "step": one.step,
                "shape": list(known[one.parameter].shape),
                "split_of": known[one.parameter].split_of or None,
                "method": one.method,
                **{name: _finite(value) for name, value in one.numbers.items()},
            }
            for one in measurements(run)
            if one.parameter in known
        ],
    }


def notes(outcome: SpectraResult) -> list[str]:
    """Return the notes below the table."""
    notes = []
    if outcome.resumed:
        notes.append(f"{outcome.resumed} layers were there already, {outcome.measured} were measured now")
    if outcome.left_out:
        by_reason: dict[str, list[str]] = {}
        for name, reason in outcome.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"left out, {reason}: {', '.join(names[:3])}{more}")
    if outcome.sweeps > 1:
        notes.append(
            f"every backward ran {outcome.sweeps} times, because replicates of all layers at once do not fit "
            "into --budget"
        )
    if math.isnan(outcome.batch):
        notes.append("the batches hold no tensor: their size is not known, and with it no noise scale")
    return notes


def _table(known: dict[str, Layer], measured: Sequence[Measurement]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold", min_width=20)
    for name in ("shape", "found", "signal", "noise scale", "stable rank"):
        table.add_column(name, justify="right")
    chosen = sorted(measured, key=lambda one: -one["signal_share"])
    for one in chosen[:SHOWN]:
        layer = known[one.parameter]
        table.add_row(
            Text(one.parameter),
            "x".join(map(str, layer.shape)),
            f"{one.identifiable} of {layer.directions}",
            f"{one['signal_share']:.3f}",
            _number(one["noise_scale"]),
            _number(one["stable_rank_gradient"]),
        )
    make_console().print(table)
    if len(chosen) > SHOWN:
        _say(("note: ", "dim"), f"{len(chosen) - SHOWN} more layers in --json")


def _say(*parts: tuple[str, str] | str) -> None:
    make_console().print(Text.assemble(*parts), soft_wrap=True, highlight=False)


def _count(measured: Sequence[Measurement]) -> str:
    return str(measured[0].replicates) if measured else "0"


def _batch(batch: float) -> str:
    return "batches" if math.isnan(batch) else f"{batch:g} samples"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "no signal" if math.isinf(value) else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
