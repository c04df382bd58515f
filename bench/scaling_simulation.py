"""What 1,000 ranks and 100 B parameters would take: a simulation from inputs that are measured first.

The model is a list of shapes, sharded tensor by tensor as FSDP2 and tensor parallelism do (rows in equal
chunks, the last ones smaller or empty). The inputs come from ``bench/scaling.py``, taken in the same run; a
run of a size that they were not fitted to is written and read as a check. Assumed, not measured: the time of
a step and the memory bandwidth of the accelerator.

    OMP_WAIT_POLICY=PASSIVE python bench/scaling_simulation.py --step 10 --bandwidth 2000
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table
from scaling import Inputs, measured, reading

from backlight.session.sampling import BUDGET
from backlight.store.write.database import AGE_SHARE, FIRST_SEGMENT_S, SEGMENT_INTERVAL_S

DAY = 86_400.0
UPDATE_EVERY = 4
"""Recorded steps between two with updates, which are sampled."""
SCALARS = 12


@dataclass(frozen=True)
class Layout:
    """Tensor parallel over ``tensor`` ranks, sharded over ``shard``, replicated over the others."""

    name: str
    ranks: int
    tensor: int
    shard: int


def shapes(
    hidden: int = 10_240, layers: int = 80, ffn: int = 32_768, vocabulary: int = 128_256
) -> list[tuple[int, int]]:
    """Return the matrices (rows, columns) of a decoder with gated feed-forward and grouped queries."""
    heads = 1024
    block = [(hidden, hidden), (heads, hidden), (heads, hidden), (hidden, hidden)]
    block += [(ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden, 1), (hidden, 1)]
    return [(vocabulary, hidden), *(block * layers), (hidden, 1), (vocabulary, hidden)]


def chunk(rows: int, parts: int, index: int) -> int:
    """Return the rows of one chunk, as torch.chunk cuts them."""
    size = -(-rows // parts)
    return max(0, min(size, rows - index * size))


def local(model: list[tuple[int, int]], layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield, for each rank of one replica, the elements that it holds and its empty shards."""
    for shard in range(layout.shard):
        elements = empty = 0
        for rows, columns in model:
            mine = chunk(chunk(rows, layout.tensor, 0), layout.shard, shard) * columns
            elements += mine
            empty += mine == 0
        yield elements, empty


def spacing(cost: float, step: float) -> int:
    """Return the spacing that the budget leads to: a power of two."""
    every = 1
    while cost > BUDGET * every * step and every < 1024:
        every *= 2
    return every


def segments(seconds: float) -> int:
    """Return how many segments a rank on network storage publishes in so long."""
    count, now = 0, 0.0
    while now < seconds:
        now += FIRST_SEGMENT_S if count == 0 else max(SEGMENT_INTERVAL_S, now * AGE_SHARE)
        count += 1
    return count


def rank_bytes(found: Inputs, parameters: int, steps: float) -> float:
    """Return the bytes that one rank writes for so many recorded steps."""
    row = found.gradient_bytes + found.update_bytes / UPDATE_EVERY
    fixed = found.file_bytes + parameters * (found.table_bytes + found.document_bytes)
    return fixed + steps * (parameters * row + SCALARS * found.scalar_bytes)


def series_seconds(found: Inputs, ranks: int, parameters: int, steps: float) -> float:
    """Return the seconds to open a run and join one series over its ranks."""
    file = found.open_seconds + found.join_file_seconds
    table = parameters * found.join_table_seconds
    return ranks * (file + table + steps * (found.join_step_seconds + parameters * found.join_row_seconds))


def check(found: Inputs, folder: Path, repeats: int) -> list[tuple[str, float, float]]:
    """Return name, prediction and what was found, of a run that no input was fitted to."""
    ranks, parameters, steps = 100, 80, 30
    _, took, _ = reading(folder, ranks, parameters, steps, repeats)
    files = (folder / f"ranks-{ranks}-{parameters}-{steps}").rglob("*.db")
    size = sum(p.stat().st_size for p in files)
    row = found.file_bytes + parameters * (found.table_bytes + steps * found.gradient_bytes)
    return [
        (f"{ranks} ranks, {parameters} parameters, {steps} steps: MB", ranks * row / 1e6, size / 1e6),
        ("the same: core seconds for one series", series_seconds(found, ranks, parameters, steps), took),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--step", type=float, default=10.0, help="seconds of a step (assumed)")
    parser.add_argument("--bandwidth", type=float, default=2000.0, help="GB/s of the accelerator (assumed)")
    parser.add_argument("--element-bytes", type=int, default=4, help="bytes of a gradient element")
    parser.add_argument("--measured-ranks", type=int, default=1000, help="rank files of the measured inputs")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="backlight-bench-", dir=base) as folder:
        found = measured(Path(folder), options.measured_ranks, options.repeats)
        checked = check(found, Path(folder), options.repeats)
    model = shapes()
    P, elements = len(model), sum(rows * columns for rows, columns in model)
    R = options.ranks
    layouts = [
        Layout(f"FSDP over {R}", R, 1, R),
        Layout(f"TP 8 x FSDP over {R // 8}", R, 8, R // 8),
        Layout(f"HSDP: {R // 8} replicas of 8", R, 1, 8),
    ]
    table = Table(
        title=f"simulated: {elements / 1e9:.0f} B parameters, {P} tensors, {R} ranks, {options.step:g} s/step"
    )
    table.add_column("")
    for layout in layouts:
        table.add_column(layout.name, justify="right")
    columns = []
    for layout in layouts:
        held = list(local(model, layout))
        most = max(e for e, _ in held)
        host = most * found.element_seconds + P * (found.tensor_seconds + found.row_seconds)
        device = most * options.element_bytes / (options.bandwidth * 1e9) + P * found.row_seconds
        every = spacing(device, options.step)
        steps = DAY / options.step / every
        size = rank_bytes(found, P, steps)
        per_step = rank_bytes(found, P, 2) - rank_bytes(found, P, 1)
        count = segments(DAY)
        repeated = (count - 1) * (found.file_bytes + P * found.table_bytes)
        columns.append(
            {
                "elements of the fullest rank": f"{most / 1e6:.0f} M",
                "empty shards of the emptiest rank": f"{max(n for _, n in held)} of {P}",
                "statistics on its host, one thread": f"{host:.2f} s",
                "the same, read once at the bandwidth": f"{device * 1e3:.1f} ms",
                "share of a step, all recorded": f"{device / options.step:.3%}",
                "spacing that 1 % leads to": f"every {every}",
                "bytes per recorded step and rank": f"{per_step / 1e3:.1f} kB",
                "a rank, one day": f"{size / 1e6:.0f} MB",
                "all ranks, one day": f"{R * size / 1e9:.0f} GB",
                "files, local disk": f"{2 * R + 1}",
                "files, network storage, one day": f"{R * (count + 1) + 1}",
                "their repeated headers": f"{R * repeated / 1e9:.0f} GB",
                "documents renamed per second there": f"{R / 15:.0f}",
                "opening all ranks": f"{R * found.open_seconds:.1f} s",
                "one series, 100 recorded steps": f"{series_seconds(found, R, P, 100):.0f} s",
                "one series, the day": f"{series_seconds(found, R, P, steps) / 60:.0f} min",
                "the day from one rank alone": f"{series_seconds(found, 1, P, steps):.1f} s",
                "all-reduce instead, per step": f"{P * 8 * 8 / 1e3:.0f} kB in each rank",
            }
        )
    for what in columns[0]:
        table.add_row(what, *(column[what] for column in columns))
    Console(width=110).print(table)
    wrong = Table(title="check: predicted from the inputs, and found")
    for name in ("", "predicted", "found", "ratio"):
        wrong.add_column(name, justify="left" if not name else "right")
    for what, predicted, took in checked:
        wrong.add_row(what, f"{predicted:.2f}", f"{took:.2f}", f"{predicted / took:.2f}")
    Console(width=110).print(wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
