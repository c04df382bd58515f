"""How often equal runs are found to differ, and whether a slowdown of 3 % is found with its interval.

Real short runs of one small model, watched into run directories, in pairs one after the other; in the slower
one each step waits, busily, for 3 % of what it took. Pairs are compared as `backlight compare` does, and
groups of pairs as `backlight compare --ab` does.

Then a simulation with a known variation between runs: the steps of two equal runs are drawn in blocks from
one recorded run, and multiplied by one factor for each run.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python bench/comparison.py --pairs 100
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import backlight
from backlight.monitors.steptime.model.step_comparison import (
    TimeComparison,
    compare_pairs,
    compare_steady,
    compare_times,
    medians,
    medians_of,
)
from backlight.monitors.steptime.model.step_times import PhaseTimes, measure_variation, read_phases

SLOWER = 1.03
ROUNDS = 8
BLOCK_STEPS = 10
SIMULATED = 1000


def train(path: Path, steps: int, slower: float) -> None:
    """Train for some steps, each stretched by ``slower``, into a run directory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 256)
    with backlight.watch(model, optimizer, run=path, monitors=("steptime",), every=1, summary=False):
        for _ in range(steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            until = began + slower * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass


def pair(
    folder: Path, name: str, steps: int, slower: float, first: int
) -> tuple[backlight.Run, backlight.Run]:
    """Make two runs, the second ``slower``; ``first`` is the one that runs first."""
    factors = (1.0, slower)
    paths = [folder / f"{name}-{side}" for side in "ab"]
    for side in (first, 1 - first):
        train(paths[side], steps, factors[side])
    return backlight.open_run(paths[0]), backlight.open_run(paths[1])


def steady(run: backlight.Run) -> PhaseTimes:
    """Return the steady steps of a run."""
    table = read_phases(run)
    assert table is not None
    return table.steady()[1]


def simulated(table: PhaseTimes, deviation: float, random: np.random.Generator) -> PhaseTimes:
    """Return a run of blocks of the recorded steps, multiplied by one factor."""
    steps = len(table.steps)
    starts = random.integers(0, steps - BLOCK_STEPS + 1, -(-steps // BLOCK_STEPS))
    rows = (starts[:, None] + np.arange(BLOCK_STEPS)).ravel()[:steps]
    return PhaseTimes(table.steps, table.names, table.seconds[rows] * np.exp(random.normal(0, deviation)))


def simulation(recorded: Sequence[PhaseTimes]) -> Table:
    """Return how often pairs differ, by the variation between runs and the runs of A at hand."""
    random = np.random.default_rng(0)
    table = Table(title=f"{SIMULATED} simulated pairs from {len(recorded)} recorded runs")
    for column in ("variation", "runs of A", "equal: step", "step or phase", "5 % slower", "10 % slower"):
        table.add_column(column, justify="right")
    for deviation in (0.005, 0.01, 0.02):
        for repeats in (1, 3, 5):
            found = []
            for number in range(SIMULATED):
                steps = recorded[number % len(recorded)]
                group = [simulated(steps, deviation, random) for _ in range(repeats)]
                other = simulated(steps, deviation, random)
                rows = compare_steady(group[0], other, [[medians_of(each) for each in group]]).rows
                low, high = rows[0].low or 0.0, rows[0].high or np.inf
                slower = (not low * by <= 1 <= high * by for by in (1.05, 1.1))
                found.append((rows[0].is_significant, any(part.is_significant for part in rows), *slower))
            table.add_row(
                f"{deviation:.1%}", str(repeats), *(f"{rate:.1%}" for rate in np.mean(found, axis=0))
            )
    return table


def row(name: str, truth: float, found: Sequence[TimeComparison]) -> list[str]:
    """Return a line of the table."""
    compared = [one for one in found if one.rows]
    steps = [one.rows[0] for one in compared]
    if not steps:
        return [name, "0", *["no steady part"] * 4]
    differs = np.mean([step.is_significant for step in steps])
    anywhere = np.mean([any(part.is_significant for part in one.rows) for one in compared])
    holds = np.mean([(step.low or 0) <= truth <= (step.high or 0) for step in steps])
    half = np.median([((step.high or 0) - (step.low or 0)) / 2 for step in steps])
    return [name, str(len(compared)), f"{differs:.0%}", f"{anywhere:.0%}", f"{holds:.0%}", f"± {half:.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    table = Table(title=f"{given.pairs} pairs of {given.steps} steps; two runs at 95 %, interleaved at 99 %")
    for column in (
        "",
        "compared",
        "step differs",
        "step or a phase differs",
        "interval contains it",
        "half width",
    ):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "warm", given.steps, 1.0)
        for words, slower in (("equal", 1.0), ("3 % slower", SLOWER)):
            runs = [
                pair(Path(folder), f"{slower}-{number}", given.steps, slower, number % 2)
                for number in track(range(given.pairs), words, console=Console(stderr=True), transient=True)
            ]
            table.add_row(*row(f"{words}: two runs", slower, [compare_times(*one) for one in runs]))
            sides = [(medians_of(steady(a)), medians_of(steady(b))) for a, b in runs]
            groups = [sides[i : i + ROUNDS] for i in range(0, len(sides) - ROUNDS + 1, ROUNDS)]
            interleaved = [compare_pairs([a for a, _ in g], [b for _, b in g]) for g in groups]
            table.add_row(*row(f"{words}: {ROUNDS} interleaved pairs", slower, interleaved))
            if slower == 1.0:
                recorded = [steady(run) for pair in runs for run in pair if medians(run) is not None]
    console = Console()
    console.print(table)
    measured = measure_variation([[float(np.median(table.total)) for table in recorded]])
    console.print(f"measured variation between {len(recorded)} equal runs: {measured.deviation:.1%}")
    console.print(simulation(recorded))


if __name__ == "__main__":
    main()
