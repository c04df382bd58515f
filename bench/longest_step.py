"""The longest steps of a watched run, against those of a plain run: nothing of backlight may hold up a step.

One program trains 10,000 steps of about a millisecond, plain and watched, in turn, each time in a process of
its own. A step is timed from the end of the one before, less what its thread waited in the run queue for a
core, so that other processes of the machine do not count; where the system reports no such time it is wall
time. Halfway the compiled statistics are requested, as a long run does. ``--where`` prints the longest steps
with their numbers.

    OMP_NUM_THREADS=1 python bench/longest_step.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = ("plain", "watched")

SCRIPT = """
import json, os, sys, time
import torch
from torch import nn

steps, kind, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = {"small": (64, 64), "large": (64, 2048)}[kind]
layers = [nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], 128), nn.ReLU(), nn.Linear(128, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(32, sizes[0])
try:
    queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
except OSError:
    queue = None
def queued():
    return int(os.pread(queue, 64, 0).split()[1]) if queue is not None else 0
taken, waited = [], []
def train():
    for step in range(steps):
        if step == steps // 2 and "backlight" in sys.modules:
            from backlight.measure.stats.compiled_rows import COMPILED_ROWS
            COMPILED_ROWS.request()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter_ns())
        waited.append(queued())
begin, delay = time.perf_counter_ns(), queued()
train()
wall = [b - a for a, b in zip([begin, *taken], taken)]
delays = [b - a for a, b in zip([delay, *waited], waited)]
with open(out, "w") as file:
    json.dump([wall, delays], file)
"""


def step_times(
    script: Path, way: str, kind: str, steps: int, folder: Path
) -> tuple[list[float], list[float]]:
    """Run the program once; return milliseconds of each step, without and with the wait for a core."""
    out = folder / "times.json"
    command = [sys.executable, str(script)]
    if way == "watched":
        console = str(Path(sys.executable).with_name("backlight"))
        run = folder / f"run-{os.urandom(4).hex()}"
        command = [console, "run", "--quiet", "--out", str(run), str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    arguments = [str(steps), kind, str(out)]
    subprocess.run([*command, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    wall, delays = json.loads(out.read_text())
    return [(a - b) / 1e6 for a, b in zip(wall, delays, strict=True)], [a / 1e6 for a in wall]


def quantile(values: list[float], share: float) -> float:
    """Return the value that a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Print a row for each run and the medians over the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--model", choices=("small", "large"), default="large")
    parser.add_argument("--where", type=int, default=0, metavar="N", help="print the N longest steps")
    options = parser.parse_args()
    columns = ("longest", "p99.9", "p99", "median", "sum", "longest, wall")
    print(f"{'milliseconds of a step':24}" + "".join(f"{name:>15}" for name in columns))
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        for number in range(options.rounds):
            for way in WAYS[number % 2 :] + WAYS[: number % 2]:
                own, wall = step_times(script, way, options.model, options.steps, folder)
                later = own[1:]  # the first step of a process pays for what torch does once
                row = [max(later), *(quantile(later, share) for share in (0.999, 0.99, 0.5)), sum(later)]
                found[way].append([*row, max(wall[1:])])
                _print_row(f"{way} {number}", found[way][-1])
                longest = sorted(range(len(own)), key=own.__getitem__, reverse=True)
                for step in longest[: options.where]:
                    print(f"    step {step}: {own[step]:.2f} ms, wall {wall[step]:.2f} ms")
    for way in WAYS:
        _print_row(f"{way}, median", [statistics.median(column) for column in zip(*found[way], strict=True)])
    print(f"load average of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


def _print_row(name: str, cells: list[float]) -> None:
    print(f"{name:24}" + "".join(f"{cell:15.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
