"""What a watched run adds to small scripts: at the start, in the steps and at the end.

Each script runs as ``python script.py`` twice (the second is the control), under ``backlight run``, and
with ``backlight.watch`` in it, in interleaved order. Figures are medians of the differences to the plain run
of the same round, with a confidence interval of the median (order statistics, at least 95 % from six rounds
on).

- start: from the start of the process until the loop begins, imports and the model included
- end: from the last step until the process has ended
- CPU: processor seconds of all threads and processes, the watchdog process included; on a machine that
  others share, it drifts less than wall time

Modules are read from bytecode, as in an installed package; without it each run would compile all of them.

    OMP_WAIT_POLICY=PASSIVE python bench/startup.py --rounds 12
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

PR_SET_CHILD_SUBREAPER = 36

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

SCRIPT = """
import contextlib, json, sys, time
import torch
from torch import nn
from torch.nn import functional as F

kind, steps, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
if kind == "mlp":
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    inputs = torch.randn(64, 64)
else:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10),
    )
    inputs = torch.randn(16, 1, 28, 28)
    model(inputs)
targets = torch.randint(0, 10, (len(inputs),))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
watch = contextlib.nullcontext()
if way == "watch":
    import backlight
    watch = backlight.watch(model, optimizer, run=sys.argv[4])
with watch:
    begin = time.monotonic(), time.process_time()
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    end = time.monotonic(), time.process_time()
print(json.dumps([begin, end]))
"""


@dataclass(frozen=True)
class Times:
    """Wall and processor seconds of the parts of one process; the watchdog process counts to its end."""

    start: tuple[float, float]
    steps: tuple[float, float]
    end: tuple[float, float]

    def of(self, *parts: str) -> tuple[float, float]:
        """Return wall and processor seconds of ``parts`` together."""
        chosen = [getattr(self, part) for part in parts]
        return sum(wall for wall, _ in chosen), sum(cpu for _, cpu in chosen)


def timed(way: str, kind: str, steps: int, folder: Path) -> Times:
    """Run the script once and return its times."""
    script, run = folder / "script.py", folder / f"run-{time.monotonic_ns()}"
    command = [sys.executable, str(script)]
    if way == "run":
        command = [str(Path(sys.executable).with_name("backlight")), "run", "--out", str(run), str(script)]
    arguments = [kind, str(steps), way, str(run)]
    before = os.times()
    began = time.monotonic()
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        out, err = process.communicate()
        ended = time.monotonic()
    if process.returncode:
        raise SystemExit(err)
    while True:  # a watchdog process outlives the script by a moment; this process has adopted it
        try:
            os.wait()
        except ChildProcessError:
            break
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [line for line in out.splitlines() if line.startswith("[[")]
    (begin, begin_cpu), (end, end_cpu) = json.loads(lines[-1])
    return Times(
        (begin - began, begin_cpu),
        (end - begin, end_cpu - begin_cpu),
        (ended - end, cpu - end_cpu),
    )


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its confidence interval from order statistics, of 95 % where there are enough."""
    ordered = sorted(values)
    count = len(ordered)
    outside = 0
    while 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count <= 0.05:
        outside += 1
    cut = max(0, outside - 1)
    return ordered[cut], statistics.median(ordered), ordered[count - 1 - cut]


PARTS = {
    "start": ("start",), "end": ("end",), "start and end": ("start", "end"), "steps": ("steps",),
    "everything": ("start", "steps", "end"),
}  # fmt: skip


def measure(kind: str, steps: int, rounds: int, folder: Path) -> Table:
    """Return the table of one script."""
    ways = {"control": "another plain run", "run": "backlight run", "watch": "with backlight.watch"}
    plain: list[Times] = []
    found: dict[str, list[Times]] = {way: [] for way in ways}
    for way in ("plain", "run", "watch"):  # reads the files from disk, and writes their bytecode
        timed(way, kind, steps, folder)
    for number in range(rounds):
        order = ["plain", *ways]
        for way in order[number % 4 :] + order[: number % 4]:
            (plain if way == "plain" else found[way]).append(timed(way, kind, steps, folder))
    table = Table(title=f"{kind}, {steps} steps, {rounds} rounds: seconds added to `python script.py`")
    table.add_column("part", no_wrap=True)
    for name in ("plain run", *ways.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for column, clock in enumerate(("wall", "CPU")):
        for label, parts in PARTS.items():
            bare = [times.of(*parts)[column] for times in plain]
            cells = [f"{statistics.median(bare):.2f}"]
            for way in ways:
                taken = [times.of(*parts)[column] for times in found[way]]
                low, middle, high = interval([one - two for one, two in zip(taken, bare, strict=True)])
                cells.append(f"{middle:+.2f} [{low:+.2f} … {high:+.2f}]")
            table.add_row(f"{label}, {clock}", *cells, end_section=label == "everything")
    return table


def main() -> None:
    """Print one table for each script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--models", nargs="+", choices=("mlp", "cnn"), default=["mlp", "cnn"])
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
        for kind in options.models:
            for steps in options.steps:
                console.print(measure(kind, steps, options.rounds, folder))
    console.print(f"load average of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
