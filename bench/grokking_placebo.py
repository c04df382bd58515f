"""Signals of grokking: control against control must not make a claim in more than 5 % of comparisons.

Trains the fast oracle and its control of random labels from several seeds (or reads the runs in DIRECTORY),
then compares, for each number of seeds, runs with controls and, as often as asked, controls with other
controls that are called runs and are given the accuracies of real ones. Such a comparison is false if any
measure is said to follow.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from backlight.experiments.config import configure
from backlight.experiments.runner import default_directory, run_experiment
from backlight.monitors.grokking.model.lead_lag import FOLLOWS, LeadLag, lead_lags
from backlight.monitors.grokking.model.reader import TEST, TRAIN, detect_run, stated
from backlight.store.read.run import Run, Scalar, open_run


def train(folder: Path, seeds: int, steps: int) -> None:
    """Train ``seeds`` runs and twice as many controls, which a placebo needs, into ``folder``."""
    for seed in range(2 * seeds):
        for control in ("", "random-labels") if seed < seeds else ("random-labels",):
            layers = {"seed": seed, "training": {"steps": steps}}
            configuration = dataclasses.replace(configure("oracle", "ci", ("bench", layers)), control=control)
            path = default_directory(configuration, folder)
            run_experiment(configuration, path, on_warning=lambda text: None)


class Placebo:
    """A control with the accuracies of a run that groks."""

    def __init__(self, control: Run, run: Run) -> None:
        self._control, self._run = control, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def scalar(self, name: str, source: str = "backlight") -> Scalar:
        """Return the accuracies of the run and all else of the control."""
        return (self._run if name in (TRAIN, TEST) else self._control).scalar(name, source=source)


def signals(runs: Sequence[Any], controls: Sequence[Run]) -> list[LeadLag]:
    """Return the measures of the first of ``runs`` that are said to follow."""
    rows = lead_lags(runs[0], detect_run(runs[0]), controls, runs[1:])
    return [row for row in rows if row.conclusion == FOLLOWS]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("directory", type=Path, nargs="*", help="directories of runs; default: train them")
    options.add_argument(
        "--seeds", type=int, default=6, help="runs that are trained, with twice as many controls"
    )
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--placebos", type=int, default=100, help="comparisons of control with control")
    chosen = options.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as temporary:
        folders = chosen.directory
        if not folders:
            folders = [Path(temporary)]
            train(folders[0], chosen.seeds, chosen.steps)
        found = [
            open_run(path.parent) for folder in folders for path in sorted(folder.glob("*/manifest.json"))
        ]
        runs = [run for run in found if not stated(run).control]
        controls = [run for run in found if stated(run).control]
        table = Table("runs and controls", "signals", "measures", "placebos with a claim", box=None)
        draw, worst = np.random.default_rng(0), 0
        for size in sorted({1, 3, 4, 5, len(runs)}):
            if size > min(len(runs), len(controls) // 2):
                continue
            true = signals(runs[:size], controls[:size])
            false: collections.Counter[bool] = collections.Counter()
            for _ in range(chosen.placebos):
                picked = [controls[row] for row in draw.permutation(len(controls))[: 2 * size]]
                called = [Placebo(control, run) for control, run in zip(picked, runs[:size], strict=False)]
                false[bool(signals(called, picked[size:]))] += 1
            worst = max(worst, false[True])
            names = ", ".join(f"{row.measure} (q {row.q:.2g})" for row in true)
            table.add_row(f"{size} and {size}", str(len(true)), names, f"{false[True]} of {false.total()}")
        console.print(table)
    if worst > 0.05 * chosen.placebos + 2 * (0.05 * 0.95 * chosen.placebos) ** 0.5:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
