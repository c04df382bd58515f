"""What the phase clock adds to a step of the demo model, and what tracing adds to a traced one.

Steps with and without the clock alternate in one process; the figures are medians over pairs of
neighbouring steps of the ratio of their times. The last column is what the hooks themselves took, as a
share of the step: it does not depend on what else the machine does.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python bench/phase_clock.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from overhead import Training
from rich.console import Console
from rich.table import Table
from torch import profiler

from backlight.capture.forward import Forwards
from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope
from backlight.capture.steps import StepTracker
from backlight.diagnose.profile.ranges import LineRanges, ModuleRanges, PhaseRanges


def clock(training: Training, pairs: int) -> tuple[list[float], list[float]]:
    """Return ratios of steps with the clock to steps without, and the shares that its hooks took."""
    tracker = StepTracker(Scope([training.model], [training.optimizer]))
    forwards = Forwards()
    ratios, shares = [], []
    for number in range(pairs + 4):
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):
            if on:
                tracker.start()
                forwards.follow([training.model])
                before = HUB.spent
            seconds[on] = training.step()[0]
            if on:
                share = (HUB.spent - before) / seconds[on]
                HUB.remove(tracker)
                forwards.leave()
        if number >= 4:
            ratios.append(seconds[True] / seconds[False])
            shares.append(share)
    return ratios, shares


def nothing(training: Training, pairs: int) -> list[float]:
    """Return ratios of two steps without anything: the noise of the comparison."""
    return [training.step()[0] / training.step()[0] for _ in range(pairs)]


def traced(training: Training, repeats: int, *, ranges: bool, lines: bool, **options: bool) -> list[float]:
    """Return ratios of a traced step to the untraced one before it."""
    ratios = []
    for _ in range(repeats):
        plain = training.step()[0]
        modules, phases, line = ModuleRanges(), PhaseRanges(), LineRanges()
        tracker = StepTracker(Scope([training.model], [training.optimizer]))
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU], **options):
            training.step()  # pays for the start
            if ranges:
                modules.follow([training.model])
                tracker.start()
                HUB.add(phases)
            if lines:
                line.begin()
            begin = time.perf_counter()
            training.step()
            seconds = time.perf_counter() - begin
            line.end()
            tracker.finish()
            HUB.remove(phases)
            phases.close()
            modules.leave()
        ratios.append(seconds / plain)
    return ratios


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    training = Training("cpu")
    step = statistics.median(training.step()[0] for _ in range(12))
    table = Table(title=f"added to a step of the demo model ({step * 1e3:.0f} ms), {options.pairs} pairs")
    for column in ("", "median", "quartiles", "hooks themselves"):
        table.add_column(column, justify="left" if not column else "right")
    ratios, shares = clock(training, options.pairs)
    for name, values, own in (
        ("nothing (two plain steps)", nothing(training, options.pairs), ""),
        ("phase clock", ratios, f"{statistics.median(shares):.3%}"),
    ):
        low, middle, high = ((value - 1) * 100 for value in statistics.quantiles(values, n=4))
        table.add_row(name, f"{middle:+.2f} %", f"{low:+.1f} … {high:+.1f} %", own)
    Console().print(table)
    table = Table(title=f"a traced step to a plain one, {options.repeats} of each")
    for column in ("traced with", "median", "quartiles"):
        table.add_column(column, justify="left" if column == "traced with" else "right")
    rows: dict[str, Callable[[], list[float]]] = {
        "operators": lambda: traced(training, options.repeats, ranges=False, lines=False),
        "shapes": lambda: traced(training, options.repeats, ranges=False, lines=False, record_shapes=True),
        "shapes, phases and modules (a traced step)": lambda: traced(
            training, options.repeats, ranges=True, lines=False, record_shapes=True
        ),
        "these and lines (the one step more)": lambda: traced(
            training, options.repeats, ranges=True, lines=True, record_shapes=True
        ),
        "shapes and stacks (--stacks)": lambda: traced(
            training, options.repeats, ranges=True, lines=False, record_shapes=True, with_stack=True
        ),
    }
    for name, take in rows.items():
        low, middle, high = statistics.quantiles(take(), n=4)
        table.add_row(name, f"{middle:.2f}", f"{low:.2f} … {high:.2f}")
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
