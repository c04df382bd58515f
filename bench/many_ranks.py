"""Cost of reading a run of many ranks: opening it, joining one series, evaluating the rules, against floors.

The ranks are simulated: each gets a file as its own process would write it, of a model that is sharded over
all of them (FSDP) next to parameters that every rank holds whole (DDP). Floors: reading the same bytes, and
the same question to a run of one rank, which holds as many numbers per step as one of the many.

    python bench/many_ranks.py --ranks 1 8 64
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from rich.console import Console
from rich.table import Table
from scaling import median, table_of

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Made
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

FULL = 4096
"""Rows of a sharded parameter over all ranks; a multiple of every number of ranks that is asked for."""


def write(path: Path, ranks: int, parameters: int, steps: int, *, sharded: bool) -> None:
    """Write a run as so many ranks would."""
    source = np.random.default_rng(0)
    norms = np.exp(source.standard_normal((steps, parameters, 3)))
    writers = [
        RunWriter.create(path, rank=r, world_size=ranks, run_id="bench", monitors=("health",))
        for r in range(ranks)
    ]
    for rank, writer in enumerate(writers):
        table = table_of(rank, ranks, parameters, rows=FULL, sharded=sharded)
        identifier = writer.parameter_table(table)
        ints = np.array([[1, p.numel, 0, 0, 0] for p in table], dtype=np.int64)
        # Shards differ, copies of one tensor do not.
        own = norms * (1.0 + 0.01 * rank) if sharded else norms
        for step in range(steps):
            writer.append("gradient", step, identifier, own[step], ints)
            writer.scalars(step, {"loss": 1.0 / (step + 1), "backwards_seen": float(step + 1)})
        writer.close()


def read_bytes(path: Path) -> int:
    """Read every file of a run, and return the bytes."""
    return sum(len(p.read_bytes()) for p in path.rglob("*") if p.is_file())


def checked(path: Path, ranks: int, parameters: int, *, sharded: bool) -> None:
    """Check that what is timed is right: the norm of the whole from its parts.

    Raises
    ------
    SystemExit
        If it is not.
    """
    norms = np.exp(np.random.default_rng(0).standard_normal((1, parameters, 3)))[0, :, 0]
    factor = np.sqrt(sum((1.0 + 0.01 * r) ** 2 for r in range(ranks))) if sharded else 1.0
    frame = open_run(path).frame("gradient", "norm")
    if not (frame.measured.all() and np.allclose(frame.values[0], norms * factor)):
        raise SystemExit(f"{ranks} ranks: what was joined is not what was written")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--parameters", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-rules", action="store_true", help="do not time the evaluation")
    options = parser.parse_args()
    title = f"{options.steps} steps, {options.parameters} parameters (median of {options.repeats})"
    table = Table(title=title)
    heads = ("layout", "ranks", "MB", "bytes s", "open s", "x bytes", "series s", "x bytes", "x one")
    for name in (*heads, "rules s", "x one"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(prefix="backlight-bench-") as base:
        for sharded in (True, False):
            one: tuple[float, float] | None = None
            for ranks in options.ranks:
                path = Path(base) / f"{sharded}-{ranks}"
                write(path, ranks, options.parameters, options.steps, sharded=sharded)
                checked(path, ranks, options.parameters, sharded=sharded)
                size = read_bytes(path)
                floor = median(lambda p=path: read_bytes(p), options.repeats)
                opening = median(lambda p=path: open_run(p), options.repeats)
                series = median(lambda p=path: open_run(p).frame("gradient", "norm"), options.repeats)
                rules = (
                    0.0
                    if options.no_rules
                    else median(
                        lambda p=path: evaluate_rules(open_run(p), made=Made.READER), min(options.repeats, 3)
                    )
                )
                one = one or (series, rules)
                cells = [f"{size / 1e6:.0f}", f"{floor:.3f}", f"{opening:.3f}", f"{opening / floor:.1f}"]
                cells += [f"{series:.3f}", f"{series / floor:.1f}", f"{series / one[0]:.1f}"]
                cells += ["-", "-"] if options.no_rules else [f"{rules:.2f}", f"{rules / one[1]:.1f}"]
                table.add_row("sharded" if sharded else "replicated", str(ranks), *cells)
    Console(width=110).print(table)
    Console().print(
        "bytes: reading all files (from the page cache). open: open_run. series: open_run and one joined\n"
        "column. rules: open_run and every rule. x one: against the first row of the layout, whose\n"
        "file is as large as one of the many, so that N x is linear.",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
