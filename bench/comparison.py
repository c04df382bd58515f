"""How often equal runs are found to differ, and whether a slowdown of 3 % is found with its interval.

Real short runs of one small model, watched into run directories, in pairs one after the other; in the slower
one each step waits, busily, for 3 % of what it took. Pairs are compared as `backlight compare` does, and
groups of pairs as `backlight compare --ab` does.

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
    STEP,
    TimeComparison,
    compare_pairs,
    compare_times,
)
from backlight.monitors.steptime.model.step_times import read_phases

SLOWER = 1.03
ROUNDS = 8


def train(path: Path, steps: int, slower: float) -> None:
    """Train for some steps, each stretched by ``slower``, into a run directory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 256)
    with backlight.watch(model, optimizer, run=path, monitors=("steptime",), every=1):
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


def medians(run: backlight.Run) -> dict[str, float]:
    """Return what one run of ``compare --ab`` gives: the medians of its steady steps."""
    table = read_phases(run)
    assert table is not None
    rest = table.steady()[1]
    return {STEP: float(np.median(rest.total)), **{n: float(np.median(rest.phase(n))) for n in rest.names}}


def row(name: str, truth: float, found: Sequence[TimeComparison]) -> list[str]:
    """Return a line of the table."""
    compared = [one for one in found if one.rows]
    steps = [one.rows[0] for one in compared]
    if not steps:
        return [name, "0", *["no steady part"] * 4]
    differs = np.mean([step.found for step in steps])
    anywhere = np.mean([any(part.found for part in one.rows) for one in compared])
    holds = np.mean([(step.low or 0) <= truth <= (step.high or 0) for step in steps])
    half = np.median([((step.high or 0) - (step.low or 0)) / 2 for step in steps])
    return [name, str(len(compared)), f"{differs:.0%}", f"{anywhere:.0%}", f"{holds:.0%}", f"± {half:.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    table = Table(title=f"{given.pairs} pairs of {given.steps} steps; intervals of 99 %")
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
            sides = [(medians(a), medians(b)) for a, b in runs]
            groups = [sides[i : i + ROUNDS] for i in range(0, len(sides) - ROUNDS + 1, ROUNDS)]
            interleaved = [compare_pairs([a for a, _ in g], [b for _, b in g]) for g in groups]
            table.add_row(*row(f"{words}: {ROUNDS} interleaved pairs", slower, interleaved))
    Console().print(table)


if __name__ == "__main__":
    main()
