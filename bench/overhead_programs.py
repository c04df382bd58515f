"""What `backlight run` adds to whole programs: processor seconds at start and end, and per step.

Ten small programs of the kinds that are public, and a loop whose steps take .3, 1, 10 and 100 ms. Each runs
as ``python``, as ``python`` once more (the control) and under ``backlight run``, interleaved; processor time
is that of all its threads and processes, the watchdog process included. Figures are medians of the
differences to the plain run of the same round. In the first half of the steps many are recorded, in the
second half few.

    OMP_NUM_THREADS=1 python bench/overhead_programs.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """
import json, sys, time
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
steps = int(sys.argv[1])

def timed(count):
    marks = []
    for step in range(count):
        if step in (0, count // 2):
            marks.append(time.process_time())
        yield step
    print(json.dumps([*marks, time.process_time(), count]))
"""

TIMED = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(4, 8)
for _ in timed(steps):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    begin = time.thread_time()  # the hooks come on top, not out of this
    while time.thread_time() - begin < {seconds}:
        pass
"""

LOOP = """
optimizer = {optimizer}
for step in timed(steps):
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    {before}
    optimizer.step()
    {after}
"""


def _loop(
    model: str, loss: str, *, optimizer: str = "Adam", before: str = "pass", after: str = "pass"
) -> str:
    made = f"torch.optim.{optimizer}(model.parameters(), lr=1e-3)"
    return model + LOOP.format(optimizer=made, loss=loss, before=before, after=after)


PROGRAMS = {
    "MLP on vectors": _loop(
        "model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))\n"
        "x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))",
        "F.cross_entropy(model(x), y)",
    ),
    "CNN on digits": _loop(
        "model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),"
        " nn.Linear(9216, 10))\nx, y = torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))",
        "F.cross_entropy(model(x), y)",
    ),
    "batch norm and schedule": _loop(
        "model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),"
        " nn.Flatten(), nn.Linear(8, 10))\nx, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))",
        "F.cross_entropy(model(x), y)",
        optimizer="SGD",
        after="optimizer.param_groups[0]['lr'] *= 0.999",
    ),
    "language model with clipping": _loop(
        "embed = nn.Embedding(96, 64)\n"
        "model = nn.ModuleList([embed, nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),"
        " nn.Linear(64, 96)])\nids = torch.randint(0, 96, (4, 32))\n"
        "def forward():\n    h = ids\n    for layer in model:\n        h = layer(h)\n    return h",
        "F.cross_entropy(forward().flatten(0, 1), ids.flatten())",
        optimizer="AdamW",
        before="nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "LSTM": _loop(
        "model = nn.LSTM(32, 64, batch_first=True)\nx = torch.randn(8, 20, 32)",
        "model(x)[0].square().mean()",
        before="nn.utils.clip_grad_value_(model.parameters(), 0.5)",
    ),
    "GAN": """
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 1))
g, d = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (G, D))
for step in timed(steps):
    fake = G(torch.randn(32, 8))
    d.zero_grad()
    (D(fake.detach()).mean() - D(torch.randn(32, 2)).mean()).backward()
    d.step()
    g.zero_grad()
    (-D(fake).mean()).backward()
    g.step()
""",
    "policy gradient, 200 forwards": """
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
state = torch.randn(1, 4)
for step in timed(steps // 20):
    kept = []
    for _ in range(200):
        with torch.no_grad():
            kept.append(model(state).argmax(-1))
    optimizer.zero_grad()
    F.cross_entropy(model(state.expand(200, 4)), torch.cat(kept)).backward()
    optimizer.step()
""",
    "autoencoder with a loader": """
import itertools
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(320, 64)), batch_size=32, shuffle=True)
batches = iter(())
for step in timed(steps):
    if step % 10 == 0:
        batches = iter(loader)
    for (x,) in itertools.islice(batches, 1):
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()
""",
    "accumulation over 4": """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(16, 64)
for step in timed(steps // 4):
    for _ in range(4):
        (model(x).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "regression with evaluations": """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
x, y = torch.randn(32, 16), torch.randn(32, 1)
for step in timed(steps):
    model.train()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step % 100 == 99:
        model.eval()
        with torch.no_grad():
            for _ in range(10):
                F.mse_loss(model(x), y)
""",
}

WORK_S = 1e-4
"""About what the training in a timed step takes; the rest of it is a loop."""

PR_SET_CHILD_SUBREAPER = 36

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

WAYS = ("plain", "control", "watched")

PARTS = ("start and end", "first half", "second half")


def seconds(program: Path, steps: int, way: str, folder: Path) -> dict[str, float]:
    """Return the processor seconds of one program, of its parts; the watchdog process counts to the end."""
    command = [sys.executable, str(program), str(steps)]
    if way == "watched":
        console = Path(sys.executable).with_name("backlight")
        command = [str(console), "run", "--quiet", str(program), str(steps)]
    before = os.times()
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    while True:  # a watchdog process outlives the script by a moment; this process has adopted it
        try:
            os.wait()
        except ChildProcessError:
            break
    after = os.times()
    whole = after.children_user + after.children_system - before.children_user - before.children_system
    begin, half, end, count = json.loads(done.stdout.splitlines()[-1])
    halves = {"first half": (half - begin) / (count // 2), "second half": (end - half) / (count - count // 2)}
    return {"start and end": whole - (end - begin), **halves}


def measure(source: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of the plain runs by part, and what the other ways add; steps are one step's."""
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "train.py"
        program.write_text(HEAD + source, encoding="utf-8")
        for number in range(rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                taken[way].append(seconds(program, steps, way, folder))
    return {
        way: {
            part: statistics.median(
                one[part] - (way != "plain") * plain[part]
                for one, plain in zip(taken[way], taken["plain"], strict=True)
            )
            for part in PARTS
        }
        for way in WAYS
    }


def main() -> None:
    """Print a row for each program as it ends, and the medians over all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of steps")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    loops = {
        f"steps of {ms:g} ms": (TIMED.format(seconds=ms / 1e3 - WORK_S), steps)
        for ms, steps in ((0.3, 10000), (1, 3000), (10, 300), (100, 30))
    }
    programs = {name: (source, 1000) for name, source in PROGRAMS.items()} | loops
    print("processor time: of a plain run; added by another plain run (the control); added by backlight run")
    print(ROW.format("program", "plain", "", "control", "", "", "backlight run", "", ""))
    unit = ("s", "ms/step")
    added = ("s", "us/step 1st half", "us/step 2nd half")
    print(ROW.format("", *unit, *added, *added), flush=True)
    found = []
    for name, (source, steps) in programs.items():
        if options.only not in name:
            continue
        times = measure(source, max(40, int(steps * options.scale)), options.rounds)
        found.append(times)
        _print_row(name, times)
    median = {
        way: {part: statistics.median(times[way][part] for times in found) for part in PARTS} for way in WAYS
    }
    _print_row("median", median)
    print(f"load average of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


ROW = "{:30} {:>5} {:>8} | {:>6} {:>17} {:>17} | {:>6} {:>17} {:>17}"


def _print_row(name: str, times: dict[str, dict[str, float]]) -> None:
    """Print one row; steps in microseconds, and as a share of the plain step."""
    plain = times["plain"]
    cells = [f"{plain['start and end']:.2f}", f"{1e3 * plain['second half']:.2f}"]
    for way in WAYS[1:]:
        cells.append(f"{times[way]['start and end']:+.2f}")
        for part in PARTS[1:]:
            more = times[way][part]
            cells.append(f"{1e6 * more:+.0f} ({more / plain[part]:+.1%})")
    print(ROW.format(name, *cells), flush=True)


if __name__ == "__main__":
    main()
