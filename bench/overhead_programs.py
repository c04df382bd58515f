"""What `backlight run` adds to whole programs: processor seconds, fixed and per step.

Ten small programs of the kinds that are public, and a loop whose steps take .3, 1, 10 and 100 ms. Each runs
as ``python``, as ``python`` once more (the control) and under ``backlight run``, interleaved; processor time
is that of all its processes, the watchdog process included. Per step is the slope between a short and a long
run.

    OMP_NUM_THREADS=1 python bench/overhead_programs.py
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

HEAD = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
steps = int(sys.argv[1])
"""

TIMED = """
import time
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(4, 8)
for _ in range(steps):
    begin = time.thread_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    while time.thread_time() - begin < {seconds}:
        pass
"""

LOOP = """
optimizer = {optimizer}
for step in range(steps):
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
for step in range(steps):
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
for step in range(steps // 20):
    kept = []
    for _ in range(200):
        with torch.no_grad():
            kept.append(model(state).argmax(-1))
    optimizer.zero_grad()
    F.cross_entropy(model(state.expand(200, 4)), torch.cat(kept)).backward()
    optimizer.step()
""",
    "autoencoder with a loader": """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(320, 64)), batch_size=32, shuffle=True)
for epoch in range(steps // 10):
    for (x,) in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()
""",
    "accumulation over 4": """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(16, 64)
for step in range(steps // 4):
    for _ in range(4):
        (model(x).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "regression with evaluations": """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
x, y = torch.randn(32, 16), torch.randn(32, 1)
for step in range(steps):
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

PR_SET_CHILD_SUBREAPER = 36

WAYS = ("plain", "control", "watched")


def seconds(program: Path, steps: int, way: str, folder: Path) -> float:
    """Return the processor seconds of one process and of those that it started."""
    command = [sys.executable, str(program), str(steps)]
    if way == "watched":
        console = Path(sys.executable).with_name("backlight")
        command = [str(console), "run", "--quiet", str(program), str(steps)]
    before = os.times()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    while True:  # a watchdog process outlives the script by a moment; this process has adopted it
        try:
            os.wait()
        except ChildProcessError:
            break
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(source: str, short: int, long: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return seconds of the long run, added seconds at its start and end, and microseconds per step."""
    taken: dict[tuple[str, int], list[float]] = {(way, n): [] for way in WAYS for n in (short, long)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "train.py"
        program.write_text(HEAD + source, encoding="utf-8")
        for number in range(rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                for steps in (short, long):
                    taken[way, steps].append(seconds(program, steps, way, folder))
    found = {}
    for way in WAYS:
        added = {
            steps: statistics.median(
                one - plain for one, plain in zip(taken[way, steps], taken["plain", steps], strict=True)
            )
            for steps in (short, long)
        }
        slope = (added[long] - added[short]) / (long - short)
        found[way] = statistics.median(taken[way, long]), added[short] - slope * short, 1e6 * slope
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of steps")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    loops = {
        f"steps of {ms:g} ms": (TIMED.format(seconds=ms / 1e3), steps)
        for ms, steps in ((0.3, 20000), (1, 8000), (10, 1000), (100, 150))
    }
    programs = {name: (source, 4000) for name, source in PROGRAMS.items()} | loops
    table = Table(title=f"processor seconds that `backlight run` adds, {options.rounds} rounds")
    table.add_column("program")
    for column in (
        "steps",
        "plain, s",
        "control: fixed, s",
        "per step, us",
        "watched: fixed, s",
        "per step, us",
    ):
        table.add_column(column, justify="right")
    for name, (source, steps) in programs.items():
        if options.only not in name:
            continue
        long = max(40, int(steps * options.scale))
        found = measure(source, max(20, long // 8), long, options.rounds)
        cells = [cell for way in WAYS[1:] for cell in (f"{found[way][1]:+.2f}", f"{found[way][2]:+.0f}")]
        table.add_row(name, str(long), f"{found['plain'][0]:.1f}", *cells)
    Console(width=130).print(table)
    print(f"load average of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
