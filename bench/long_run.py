"""What a run of a million recorded steps leaves: bytes, peak memory, seconds and size of its report.

The steps are synthetic and go through the writer thread's own code and the run writer, without a model;
one of them is a spike, which must be in the report's numbers. With ``--all`` every step is stored, as with
``--every 1``.

    python bench/long_run.py --steps 16000 100000 1000000
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scaling import table_of

from backlight.analysis.report import write_html
from backlight.monitor import StoredStep
from backlight.session.sampling import StepSelection
from backlight.session.writer_thread import WriterThread
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

SCALARS = ("loss", "lr/0/0", "cost", "time", "phase/forward", "phase/backward", "phase/optimizer")


def peak_mb() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def record(path: Path, steps: int, parameters: int, *, store_all: bool) -> None:
    """Write a run of so many recorded steps, with a spike at two thirds."""
    source = np.random.default_rng(0)
    table = table_of(0, 1, parameters)
    writer = RunWriter.create(path, monitors=("health",))
    selection: StepSelection[StoredStep] = StepSelection()
    quiet = SimpleNamespace(call=lambda *_: None)
    nothing: Any = None
    thread = WriterThread(nothing, nothing, quiet, writer, 1.0, print, None if store_all else selection)  # type: ignore[arg-type]
    noise = np.exp(0.1 * source.standard_normal((1009, parameters, 3)))
    ints = np.array([[1, p.numel, 0, 0, 0] for p in table], dtype=np.int64)
    sampled = np.array([[1, 4096, p.numel] for p in table], dtype=np.int64)
    for step in range(steps):
        loss = 4.0 / (1 + step) ** 0.1 * (1 + 0.05 * noise[step % 1009, 0, 0])
        loss = 1000.0 if step == 2 * steps // 3 else loss
        floats = noise[step % 1009]
        blobs = {("gradient", 0): (floats, ints)}
        if step % 4 == 0:
            blobs["update", 0] = (floats[:, :2] * (1e-3, 1.0), sampled)
        scalars = dict.fromkeys(SCALARS, 0.1 + step) | {"loss": loss, "time": 0.6 * step}
        thread.keep(StoredStep(step, table, scalars, blobs), in_detail=False)
        if step % 500 == 0:
            writer.reach(step)
            writer.flush()
    thread.put(selection.flush())
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[16_000, 100_000, 1_000_000])
    parser.add_argument("--parameters", type=int, default=30)
    parser.add_argument("--all", action="store_true", help="store every recorded step")
    options = parser.parse_args()
    table = Table(title=f"{options.parameters} parameters, every step recorded")
    for name in ("steps", "stored", "MB", "writing s", "peak MB", "report s", "CPU s", "page MB"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory(prefix="backlight-bench-") as base:
        for steps in options.steps:
            path = Path(base) / str(steps)
            began = time.perf_counter()
            record(path, steps, options.parameters, store_all=options.all)
            writing, memory = time.perf_counter() - began, peak_mb()
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e6
            loss = open_run(path).scalar("loss")
            if loss.values.max() != 1000.0:
                raise SystemExit(f"{steps} steps: the spike is lost")
            began, cpu = time.perf_counter(), time.process_time()
            page = write_html(path, Path(base) / "report.html")
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            cells = [f"{steps:,}", f"{len(loss.steps):,}", f"{size:.1f}", f"{writing:.0f}", f"{memory:.0f}"]
            table.add_row(*cells, f"{took:.1f}", f"{cpu:.1f}", f"{page.stat().st_size / 1e6:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
