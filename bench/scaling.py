"""The inputs of the plan in docs/scaling.md, measured here: bytes, seconds per statistic, what reading costs.

Nothing is a model in this file: numbers are taken from files that the writer wrote, statistics that were
taken and runs that were read. ``bench/scaling_simulation.py`` starts from them. Seconds are those of the
process on its core, from the page cache, so that a busy machine does not count.

    OMP_WAIT_POLICY=PASSIVE python bench/scaling.py --ranks 1000

With ``--read`` runs of 723 parameters and 100 steps are written, read, compacted and read again, each
reading in a process of its own, of which the peak memory is taken:

    OMP_WAIT_POLICY=PASSIVE python bench/scaling.py --read 1 64 1000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import backlight
from backlight.findings.evaluate import findings_of
from backlight.measure.stats import statistics as measure
from backlight.records import Layout, ParameterRecord, Placement
from backlight.store.read.run import open_run
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

ROWS = 64_000
"""Rows of the sharded parameters that are written."""


@dataclass(frozen=True)
class Inputs:
    """What was measured, per file, per row (one parameter at one recorded step), per element."""

    file_bytes: float
    table_bytes: float
    document_bytes: float
    gradient_bytes: float
    update_bytes: float
    scalar_bytes: float
    element_seconds: float
    tensor_seconds: float
    row_seconds: float
    open_seconds: float
    join_file_seconds: float
    join_table_seconds: float
    join_step_seconds: float
    join_row_seconds: float
    floor_file_seconds: float


def table_of(
    rank: int, ranks: int, parameters: int, *, rows: int = ROWS, sharded: bool = True
) -> tuple[ParameterRecord, ...]:
    """Return the parameter table of one rank: of each parameter its share of the rows, or all of them."""
    own = rows // ranks if sharded else rows
    layout = Layout.WHOLE if ranks == 1 else Layout.SHARD if sharded else Layout.REPLICATE
    place = Placement(layout, (rows, 1024), (own, 1024), (rank * own if sharded else 0, 0))
    return tuple(
        ParameterRecord(
            f"model.layers.{i}.weight", (rows, 1024), "float32", "cuda:0", own * 1024, placement=place
        )
        for i in range(parameters)
    )


def write_rank(
    path: Path, rank: int, ranks: int, parameters: int, steps: int, *, update: bool = False, scalars: int = 0
) -> RunWriter:
    """Write one rank, and return its writer: rank 0 closes last, as the others join while it runs."""
    writer = RunWriter.create(path, rank=rank, world_size=ranks, run_id="bench")
    table = table_of(rank, ranks, parameters)
    identifier = writer.parameter_table(table)
    source = np.random.default_rng(rank)
    counts = np.array([[1, p.numel, 0, 0, 0] for p in table], dtype=np.int64)
    sampled = np.array([[1, 4096, p.numel] for p in table], dtype=np.int64)
    for step in range(steps):
        floats = np.exp(source.standard_normal((parameters, 3)))
        floats[:, 1] = floats[:, 1].astype(np.float32)
        writer.append("gradient", step, identifier, floats, counts)
        if update:
            writer.append("update", step, identifier, floats[:, :2], sampled)
        writer.scalars(step, {f"scalar/{i}": float(floats[0, 0]) for i in range(scalars)})
    writer.flush()
    if rank:
        writer.close()
    return writer


def written(folder: Path, parameters: int, steps: int, **more: int) -> int:
    """Return the bytes of the database of one rank that recorded so much."""
    path = folder / f"run-{time.monotonic_ns()}"
    write_rank(path, 0, 1, parameters, steps, **more).close()  # type: ignore[arg-type]  # update is a flag
    return (path / "attempt-000" / "rank-00000.db").stat().st_size


def median(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call on its core, so that a busy machine does not count."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        took.append(time.process_time() - began)
    return statistics.median(took)


def document_bytes(folder: Path) -> float:
    """Return the bytes of a rank's document per parameter, of a transformer that was really watched."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = folder / "watched"
    with backlight.watch(model, optimizer, run=path, every=1, monitors=("health",)):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 4, 16)).square().mean().backward()
            optimizer.step()
    return (path / "attempt-000" / "rank-00000.json").stat().st_size / len(list(model.parameters()))


def statistic_seconds(repeats: int) -> tuple[float, float]:
    """Return the seconds per element of large gradients, and per tensor of tiny ones, on one thread."""
    large = [torch.randn(4_000_000) for _ in range(8)]
    tiny = [torch.randn(16) for _ in range(2000)]
    took = []
    for tensors in (large, tiny):
        measure.statistics(tensors).arrays()
        took.append(median(lambda t=tensors: measure.statistics(t).arrays(), repeats))
    return took[0] / sum(t.numel() for t in large), took[1] / len(tiny)


def reading(
    folder: Path, ranks: int, parameters: int, steps: int, repeats: int
) -> tuple[float, float, float]:
    """Return the seconds to open, to open and join one series, and to read the bytes, of so many rank files.

    Raises
    ------
    SystemExit
        If what is joined is not measured throughout.
    """
    path = folder / f"ranks-{ranks}-{parameters}-{steps}"
    first = write_rank(path, 0, ranks, parameters, steps)
    for rank in range(1, ranks):
        write_rank(path, rank, ranks, parameters, steps)
    first.close()
    if not open_run(path).frame("gradient", "norm").measured.all():
        raise SystemExit("what was joined is not all measured")
    files = [p for p in path.rglob("*") if p.is_file()]
    opening = median(lambda: open_run(path), repeats)
    joining = median(lambda: open_run(path).frame("gradient", "norm"), repeats)
    floor = median(lambda: [p.read_bytes() for p in files], repeats)
    return opening, joining, floor


def measured(folder: Path, ranks: int, repeats: int) -> Inputs:
    """Measure everything; files go into ``folder``."""
    P, S = 150, 400
    empty, wide, long = written(folder, 1, 1), written(folder, 2000, 1), written(folder, P, S)
    short = written(folder, P, S // 2)
    updated, scalars = written(folder, P, S, update=True), written(folder, P, S, scalars=12)
    element, tensor = statistic_seconds(repeats)
    table = table_of(0, 1, P)
    writer = RunWriter.create(folder / "timed")
    identifier = writer.parameter_table(table)
    floats, counts = np.ones((P, 3)), np.ones((P, 5), dtype=np.int64)

    def row() -> None:
        for step in range(200):
            writer.append("gradient", step, identifier, floats, counts)
        writer.flush()

    row_seconds = median(row, repeats) / (200 * P)
    writer.close()
    sizes = [(10, 5), (40, 5), (10, 65), (40, 65)]
    found = [reading(folder, ranks, *size, repeats) for size in sizes]
    # Four runs and four unknowns: seconds per file, per parameter, per recorded step, per both.
    terms = np.array([[1, p, s, p * s] for p, s in sizes], dtype=float)
    whole = np.linalg.solve(terms, np.array([took / ranks for _, took, _ in found]))
    per_file, per_table, per_step, per_row = np.maximum(whole, 0.0).tolist()
    one = found[0]
    return Inputs(
        file_bytes=empty,
        table_bytes=(wide - empty) / 1999,
        document_bytes=document_bytes(folder),
        gradient_bytes=(long - short) / (P * S / 2),
        update_bytes=(updated - long) / (P * S),
        scalar_bytes=(scalars - long) / (12 * S),
        element_seconds=element,
        tensor_seconds=tensor,
        row_seconds=row_seconds,
        open_seconds=one[0] / ranks,
        join_file_seconds=max(0.0, per_file - one[0] / ranks),
        join_table_seconds=per_table,
        join_step_seconds=per_step,
        join_row_seconds=per_row,
        floor_file_seconds=one[2] / ranks,
    )


QUESTIONS: dict[str, Callable[[Path], object]] = {
    "open": open_run,
    "one series": lambda path: open_run(path).frame("gradient", "norm"),
    "one series of one rank": lambda path: open_run(path).frame("gradient", "norm", rank=0),
    "findings": lambda path: findings_of(open_run(path)),
    "compact": compact,
}
"""What is asked of a run, each time in a new process."""


def answer(question: str, path: Path) -> None:
    """Print wall seconds, seconds of all cores and peak memory in MB of one question."""
    began, cpu = time.perf_counter(), time.process_time()
    QUESTIONS[question](path)
    # Not ru_maxrss, which a process inherits from the one that starts it.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu, peak]))


def ask(question: str, path: Path) -> tuple[float, float, float]:
    """Return what :func:`answer` prints in a process of its own."""
    command = [sys.executable, __file__, "--answer", question, "--folder", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall, cpu, peak = json.loads(printed.splitlines()[-1])
    return wall, cpu, peak


def read_all(folder: Path, many: list[int], parameters: int, steps: int, repeats: int) -> Table:
    """Return a table of every question to runs of so many ranks, before and after compaction."""
    table = Table(
        title=f"{parameters} parameters, {steps} steps (median of {repeats}; wall s, CPU s, peak MB)"
    )
    for name in ("ranks", "stored as", "MB", *QUESTIONS):
        table.add_column(name, justify="right", no_wrap=True)
    floor = ask("open", written_run(folder, 1, 1, 1))[2]
    for ranks in many:
        path = written_run(folder, ranks, parameters, steps)
        for stored in ("databases", "columns"):
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e6
            cells = [str(ranks), stored, f"{size:.0f}"]
            for question in QUESTIONS:
                if question == "compact" and stored == "columns":
                    cells.append("")
                    continue
                rounds = 1 if question == "compact" else repeats
                found = [ask(question, path) for _ in range(rounds)]
                wall, cpu, peak = (statistics.median(column) for column in zip(*found, strict=True))
                cells.append(f"{wall:.2f} {cpu:.2f} {peak:.0f}")
            table.add_row(*cells)
        shutil.rmtree(path)
    table.caption = f"a process that opens a run of one row has a peak of {floor:.0f} MB"
    return table


def written_run(folder: Path, ranks: int, parameters: int, steps: int) -> Path:
    """Return a finished run of so many shards."""
    path = folder / f"read-{ranks}-{parameters}"
    first = write_rank(path, 0, ranks, parameters, steps, scalars=2)
    for rank in range(1, ranks):
        write_rank(path, rank, ranks, parameters, steps, scalars=2)
    first.close()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000, help="rank files that are written and read")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where runs are written; without it in memory, if there")
    parser.add_argument("--read", type=int, nargs="+", metavar="RANKS", help="read runs of so many ranks")
    parser.add_argument("--answer", choices=list(QUESTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.folder)
        return 0
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    base = options.folder or (shared if os.access(shared, os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix="backlight-bench-", dir=base) as folder:
        if options.read:
            Console(width=160).print(read_all(Path(folder), options.read, 723, 100, options.repeats))
            return 0
        found = measured(Path(folder), options.ranks, options.repeats)
    table = Table(title=f"measured inputs, {options.ranks} rank files (median of {options.repeats})")
    table.add_column("what")
    table.add_column("found", justify="right")
    floor = found.floor_file_seconds
    for what, value in (
        ("database of a rank before its first row", f"{found.file_bytes / 1e3:.0f} kB"),
        ("+ per parameter of its table", f"{found.table_bytes:.0f} B"),
        ("document of a rank, per parameter", f"{found.document_bytes:.0f} B"),
        ("gradients, per parameter and recorded step", f"{found.gradient_bytes:.1f} B"),
        ("updates, per parameter and recorded step", f"{found.update_bytes:.1f} B"),
        ("a scalar of a step", f"{found.scalar_bytes:.1f} B"),
        ("statistics, per gradient element (one thread)", f"{found.element_seconds * 1e9:.2f} ns"),
        ("statistics, per tensor", f"{found.tensor_seconds * 1e6:.1f} us"),
        ("writing, per parameter and recorded step", f"{found.row_seconds * 1e6:.2f} us"),
        ("reading the bytes of a rank file (floor)", f"{floor * 1e3:.3f} ms"),
        (
            "opening, per rank file",
            f"{found.open_seconds * 1e3:.3f} ms ({found.open_seconds / floor:.1f} x floor)",
        ),
        ("joining a series, per rank file", f"{found.join_file_seconds * 1e3:.3f} ms"),
        ("+ per rank and parameter", f"{found.join_table_seconds * 1e6:.1f} us"),
        ("+ per rank and recorded step", f"{found.join_step_seconds * 1e6:.1f} us"),
        ("+ per rank, parameter and recorded step", f"{found.join_row_seconds * 1e9:.0f} ns"),
    ):
        table.add_row(what, value)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
