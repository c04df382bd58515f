"""What tracking the geometry of gradients adds to a run, and what a snapshot takes on disk.

Blocks of steps of one experiment alternate between a run that is tracked into a run directory and its
control that is not, so that a machine whose speed drifts slows both equally; a block holds one of everything
that is measured regularly (eigenvectors, which are rare, are charged at their cadence). Both evaluate what
the experiment logs. Times are processor seconds of all threads, writing included; the share is that of
all blocks, with quartiles over pairs of neighbouring ones. Disk: the arrays of such a
run, by filter, and bytes of a snapshot next to the dense M x M matrix of the same type.

    OMP_WAIT_POLICY=PASSIVE python bench/tracking.py --experiment nanda
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from backlight.experiments.config import assigned, configure
from backlight.experiments.runner import Loop, OffsetRecorder, build, measures_of, probe_of, run_experiment
from backlight.monitors.grokking.instrument.tracker import MeasureTracker
from backlight.store.format.arrays import ArrayInfo, Filters, Stack, write_piece
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from backlight.text import size

OFF = ("gradients", "products", "window", "mean_gradient", "gram", "vectors", "agop", "sketch")
VARIANTS: dict[str, list[str]] = {
    "as configured": [],
    "gradients of every logged step": [f"measures.{name}=0" for name in OFF[1:]],
    "everything at every logged step": [f"measures.{name}=1" for name in OFF[:5]],
}


class Nothing:
    """Takes everything and keeps nothing."""

    def __getattr__(self, _name: str) -> Any:
        """Return what takes anything."""
        return lambda *_given, **_named: None


class Logging(OffsetRecorder):
    """A recorder that also stores evaluations."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store what an evaluation gave."""
        self.scalars(step, values, source="user")


def added(name: str, changes: list[str], blocks: int, warm: int) -> tuple[float, ...]:
    """Return the share added by tracking in all, its quartiles over blocks, milliseconds of a bare step."""
    base = ["training.steps=1000000", *changes]
    tracked = configure(name, "ci", ("bench", assigned(base)))
    bare = configure(name, "ci", ("bench", assigned([*base, *(f"measures.{m}=0" for m in OFF)])))
    duration = tracked.settings.training
    every = duration.log_every
    cadences = [getattr(tracked.measures, m) for m in OFF if m != "vectors"]
    # As long as the two seconds between flushes of a run, so that writing has its true share.
    block = every * max([10, *cadences])
    rare = tracked.measures.vectors
    with tempfile.TemporaryDirectory() as directory:
        writer = RunWriter.create(Path(directory) / "run")
        sink = Logging(writer, 0)
        first, second = build(tracked), build(bare)
        measures = measures_of(tracked)
        tracker = MeasureTracker(measures, sink, probe_of(first, measures))
        without = MeasureTracker(measures_of(bare), Nothing())
        loops = (
            Loop(first, duration, tracker, sink.log, lambda _s, _c: None),
            Loop(second, duration, without, lambda _s, _v: None, lambda _s, _c: None),
        )
        for loop in loops:
            for step in range(1, 1 + warm):
                loop.step(step)
        shares, steps, sums, at, extra = [], [], [0.0, 0.0], 0, 0.0
        for number in range(blocks):
            # Vectors fall on the first block; their share is put where their cadence would have them.
            at = (number + 1) * block
            seconds = []
            for loop in loops if number % 2 else loops[::-1]:
                begin = time.process_time()
                for step in range(at, at + block):
                    loop.step(step)
                if loop is loops[0]:
                    writer.flush()
                seconds.append(time.process_time() - begin)
            mine, bare_seconds = seconds if number % 2 else seconds[::-1]
            has_vectors = rare and (at // every) % rare == 0
            if not has_vectors:
                shares.append(mine / bare_seconds - 1)
                sums[0], sums[1] = sums[0] + mine, sums[1] + bare_seconds
                steps.append(bare_seconds / block)
        if rare:
            loop = loops[0]
            step = every * rare * (at // (every * rare) + 1)
            times = []
            for vectors in (rare, 0):
                chosen = replace(tracked.measures, vectors=vectors)
                loop.tracker.measures = chosen.logged_every(every)
                begin = time.process_time()
                loop.tracker.sample(step)
                times.append(time.process_time() - begin)
            extra = (times[0] - times[1]) / (every * rare * statistics.median(steps))
            shares = [share + extra for share in shares]
        writer.close()
    low, middle, high = statistics.quantiles(shares, n=4)
    return sums[0] / sums[1] - 1 + extra, low, middle, high, 1000 * statistics.median(steps)


def compressed(run: Path, console: Console) -> None:
    """Print what each filter makes of the arrays of a run."""
    opened = open_run(run)
    table = Table(title="arrays of the run by filter: bytes before over after, and MB/s written")
    table.add_column("filter")
    kinds = {"gradients": "gradient/", "Grams": "gram/", "window": "window/matrix"}
    for kind in kinds:
        table.add_column(kind, justify="right")
    rows = [Filters("none"), Filters("lzf"), *(Filters("gzip", level) for level in (1, 4, 9))]
    for filters in rows:
        cells = []
        for prefix in kinds.values():
            stacks = []
            for name in opened.array_names():
                steps, values = opened.array(name)
                if (
                    name.startswith(prefix)
                    and len({v.shape for v in values}) == 1
                    and not name.endswith("vectors")
                ):
                    info = ArrayInfo(name, (), str(values[0].dtype), "1", "plain", 1)
                    stacks.append(Stack(info, steps, np.stack(values)))
            raw = sum(s.values.nbytes for s in stacks)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "rank-00000-000000.h5"
                begin = time.process_time()
                write_piece(path, stacks, filters)
                seconds = time.process_time() - begin
                cells.append(f"{raw / path.stat().st_size:.3f}  {raw / 1e6 / seconds:.0f}" if raw else "-")
        label = filters.compression + (f" {filters.level}" if filters.compression == "gzip" else "")
        table.add_row(label + (" after shuffle" if label != "none" else ""), *cells)
    console.print(table)


def snapshots(run: Path, console: Console) -> None:
    """Print bytes of a snapshot of each object next to the dense matrix."""
    opened = open_run(run)
    count = sum(p.numel for p in opened.parameters()) or sum(
        opened.array(n)[1][0].size for n in opened.array_names() if n.startswith("gradient/")
    )
    dense = 4 * count**2
    table = Table(title=f"bytes of a snapshot, M = {count:,}: dense M x M in float32 is {size(dense)}")
    table.add_column("object")
    for column in ("bytes", "dense over this"):
        table.add_column(column, justify="right")
    kinds = {
        "gradient (exact, every entry of its product)": lambda n: n.startswith("gradient/"),
        "Gram of the model": lambda n: n == "gram/model/matrix",
        "all Grams and spectra": lambda n: n.startswith("gram/") and not n.endswith("vectors"),
        "leading eigenvectors": lambda n: n == "gram/model/vectors",
    }
    for label, chosen in kinds.items():
        one = sum(opened.array(n)[1][-1].nbytes for n in opened.array_names() if chosen(n))
        if one:
            table.add_row(label, size(one), f"{dense / one:,.0f}")
    files = sum(p.stat().st_size for p in run.rglob("*.h5"))
    logged = len(opened.scalar("gradient/norm").steps)
    table.add_row(
        f"whole run on disk, per logged step ({logged})",
        size(files / logged),
        f"{dense * logged / files:,.0f}",
    )
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", default="nanda")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run whose disk is looked at")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    table = Table(title=f"{asked.experiment}, ci preset, one thread: share of the time that tracking adds")
    for column in ("what is tracked", "in all", "lower quartile", "median", "upper quartile", "a bare step"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    for label, changes in VARIANTS.items():
        whole, low, middle, high, step = added(asked.experiment, changes, asked.blocks, 20)
        table.add_row(
            label, f"{whole:+.1%}", f"{low:+.1%}", f"{middle:+.1%}", f"{high:+.1%}", f"{step:.2f} ms"
        )
    console.print(table)
    with tempfile.TemporaryDirectory() as directory:
        items = [f"training.steps={asked.steps}", "run.disk_free=0"]
        run = Path(directory) / "run"
        run_experiment(configure(asked.experiment, "ci", ("bench", assigned(items))), run)
        compressed(run, console)
        snapshots(run, console)


if __name__ == "__main__":
    main()
