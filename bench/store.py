"""What the run directory costs: seconds to write, megabytes, seconds to read one series, next to two others.

The same 10,000 steps of 150 parameters with 8 numbers each go into a run directory, into an SQLite table
with one row per parameter and step, and into resizable HDF5 datasets. ``gradients`` are numbers as a
training has them (counts mostly 0, sizes fixed, the largest value a float32); ``noise`` are 8 numbers
of which no bit can be saved.

    python bench/store.py --steps 10000 --parameters 150
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table

from backlight.records import ParameterRecord
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

FLUSH_EVERY = 500
"""Steps per flush: a training of 2 ms per step that flushes every second."""

Numbers = tuple[np.ndarray, np.ndarray, tuple[ParameterRecord, ...]]


def numbers(kind: str, steps: int, parameters: int) -> Numbers:
    """Return floats ``[steps, P, 3]``, integers ``[steps, P, 5]`` and the parameter table."""
    source = np.random.default_rng(0)
    numel = source.integers(64, 4_000_000, parameters)
    floats = np.exp(source.standard_normal((steps, parameters, 3)))
    ints = np.zeros((steps, parameters, 5), dtype=np.int64)
    if kind == "noise":
        ints = source.integers(2**40, 2**62, ints.shape)
        ints[:, :, 0] |= 1
    else:
        floats[:, :, 1] = floats[:, :, 1].astype(np.float32)
        ints[:, :, 0], ints[:, :, 1] = 1, numel
        # An embedding has many zeros, a few tensors have some.
        ints[:, 0, 2] = source.integers(0, numel[0], steps)
        ints[:, 1:10, 2] = source.integers(0, 5, (steps, 9))
    table = tuple(
        ParameterRecord(f"layer{i}.weight", (int(n),), "float32", "cpu", int(n)) for i, n in enumerate(numel)
    )
    return floats, ints, table


def write_run(path: Path, data: Numbers, tell: Callable[[int], None]) -> None:
    floats, ints, table = data
    writer = RunWriter.create(path)
    identifier = writer.parameter_table(table)
    for step in range(len(floats)):
        writer.append("gradient", step, identifier, floats[step], ints[step])
        if step % FLUSH_EVERY == FLUSH_EVERY - 1:
            writer.flush()
            tell(step + 1)
    writer.close()


def read_run(path: Path) -> np.ndarray:
    return open_run(path).frame("gradient", "norm").values


def write_rows(path: Path, data: Numbers, tell: Callable[[int], None]) -> None:
    floats, ints, _ = data
    path.mkdir()
    connection = sqlite3.connect(path / "rows.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        "CREATE TABLE row (step INTEGER, parameter INTEGER, a REAL, b REAL, c REAL, d INTEGER, e INTEGER,"
        " f INTEGER, g INTEGER, h INTEGER, PRIMARY KEY (parameter, step)) WITHOUT ROWID"
    )
    for start in range(0, len(floats), FLUSH_EVERY):
        connection.execute("BEGIN")
        for step in range(start, min(start + FLUSH_EVERY, len(floats))):
            connection.executemany(
                "INSERT INTO row VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (step, p, *f, *i)
                    for p, (f, i) in enumerate(zip(floats[step].tolist(), ints[step].tolist(), strict=True))
                ],
            )
        connection.execute("COMMIT")
        tell(start + FLUSH_EVERY)
    connection.close()


def read_rows(path: Path) -> np.ndarray:
    connection = sqlite3.connect(path / "rows.db")
    rows = connection.execute("SELECT step, parameter, a FROM row").fetchall()
    connection.close()
    table = np.array(rows)
    out = np.empty((int(table[:, 0].max()) + 1, int(table[:, 1].max()) + 1))
    out[table[:, 0].astype(int), table[:, 1].astype(int)] = table[:, 2]
    return out


def write_hdf5(path: Path, data: Numbers, tell: Callable[[int], None]) -> None:
    floats, ints, _ = data
    path.mkdir()
    P = floats.shape[1]
    with h5py.File(path / "series.h5", "w") as file:
        sets = [
            file.create_dataset(name, (0, P, k), dtype, maxshape=(None, P, k), chunks=(64, P, k))
            for name, dtype, k in (("floats", "f8", 3), ("ints", "i8", 5))
        ]
        for start in range(0, len(floats), FLUSH_EVERY):
            for dataset, values in zip(sets, (floats, ints), strict=True):
                part = values[start : start + FLUSH_EVERY]
                dataset.resize(start + len(part), axis=0)
                dataset[start : start + len(part)] = part
            file.flush()
            tell(start + FLUSH_EVERY)


def read_hdf5(path: Path) -> np.ndarray:
    with h5py.File(path / "series.h5") as file:
        return np.asarray(file["floats"][:, :, 0])


WAYS: dict[str, tuple[Callable[[Path, Numbers, Callable[[int], None]], None], Callable[[Path], np.ndarray]]]
WAYS = {
    "run directory": (write_run, read_run),
    "SQLite rows": (write_rows, read_rows),
    "HDF5": (write_hdf5, read_hdf5),
}


def survived(method: str, data: Numbers, kills: int, seconds: float, base: Path) -> int:
    """Return after how many of so many kills, at random moments, every flushed step is read as it was."""
    write, read = WAYS[method]
    source, path, good, done = np.random.default_rng(1), base / "killed", 0, 0
    flushed = mmap.mmap(-1, mmap.PAGESIZE)
    while done < kills:
        shutil.rmtree(path, ignore_errors=True)
        flushed[:8] = bytes(8)
        child = os.fork()
        if child == 0:
            try:
                write(path, data, lambda steps: flushed.__setitem__(slice(0, 8), steps.to_bytes(8, "little")))
            finally:
                os._exit(0)
        time.sleep(source.uniform(0.1, 0.9) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = int.from_bytes(flushed[:8], "little")
        if not steps or steps == len(data[0]):
            continue
        done += 1
        try:
            values = read(path)
        except Exception:  # noqa: BLE001 - whatever a reader meets, it could not read
            continue
        good += len(values) >= steps and np.array_equal(values, data[0][: len(values), :, 0])
    shutil.rmtree(path, ignore_errors=True)
    return good


def measure(method: str, data: Numbers, repeats: int, base: Path) -> tuple[float, float, float]:
    """Return the median seconds to write, the megabytes, and the median seconds to read one series.

    Raises
    ------
    SystemExit
        If a method does not give back what was written.
    """
    write, read = WAYS[method]
    path, wrote, took, size = base / "store", [], [], 0
    for _ in range(repeats):
        shutil.rmtree(path, ignore_errors=True)
        began = time.perf_counter()
        write(path, data, lambda _: None)
        wrote.append(time.perf_counter() - began)
        size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        for _ in range(repeats):
            began = time.perf_counter()
            values = read(path)
            took.append(time.perf_counter() - began)
        if not np.array_equal(values, data[0][:, :, 0]):
            raise SystemExit(f"{method}: what was read is not what was written")
    shutil.rmtree(path)
    return statistics.median(wrote), size / 1e6, statistics.median(took)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--parameters", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10, help="kills of a writer, per method")
    options = parser.parse_args()
    raw = options.steps * options.parameters * 8 * 8 / 1e6
    title = f"{options.steps:,} steps, {options.parameters} parameters, 8 numbers: {raw:.0f} MB"
    table = Table(title=f"{title} (median of {options.repeats})")
    heads = ("numbers", "stored as", "write s", "x", "MB", "x", "read s", "x", "kills")
    for name in heads:
        table.add_column(name, justify="left" if name in heads[:2] else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(prefix="backlight-bench-") as base:
        for kind in ("gradients", "noise"):
            data = numbers(kind, options.steps, options.parameters)
            first: tuple[float, float, float] | None = None
            for method in WAYS:
                found = measure(method, data, options.repeats, Path(base))
                alive = survived(method, data, options.kills, found[0], Path(base))
                first = first or found
                cells = [
                    cell for a, b in zip(found, first, strict=True) for cell in (f"{a:.3f}", f"{a / b:.1f}")
                ]
                cells[2] = f"{found[1]:.1f}"
                table.add_row(kind, method, *cells, f"{alive}/{options.kills}")
    Console().print(table)
    Console().print(
        "read: one series. kills: how often every flushed row is read after SIGKILL.\n"
        f"x: relative to the run directory. One flush every {FLUSH_EVERY} steps."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
