"""Injected times, operations and copies against what ``backlight profile`` says of them.

A script sleeps in each phase and in two modules, and takes the time of each of its sleeps, since a busy
machine wakes late; it has attention of known size, and copies on a known line. It is profiled as a user
would. Aim: sleeps within 5 % in phase and module, operations exactly, the copy at its line, phases that
add up to the step within 2 %.

    OMP_NUM_THREADS=1 python bench/injected_times.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

INJECTED = {"data": 24.0, "forward": 60.0, "loss": 30.0, "backward": 50.0, "optimizer": 40.0, "other": 35.0}
"""Milliseconds of sleep in each phase."""

BATCH, HEADS, LENGTH, SIZE, LAYERS, TOKENS = 2, 2, 16, 8, 3, 32

SCRIPT = """
import json
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

slept = {}

def sleep(phase, milliseconds):
    begin = time.perf_counter()
    time.sleep(milliseconds / 1e3)
    slept.setdefault(phase, []).append((time.perf_counter() - begin) * 1e3)

class Data(Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index):
        sleep("data", DATA / BATCH)
        return torch.ones(LENGTH, HEADS * SIZE)

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        sleep("backward", BACKWARD)
        return grad

class Slow(nn.Module):
    def forward(self, x):
        sleep("forward", FORWARD)
        return x

class SlowBackward(nn.Module):
    def forward(self, x): return Sleep.apply(x)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(HEADS * SIZE, HEADS * SIZE)
    def forward(self, x):
        q = self.project(x).view(x.shape[0], LENGTH, HEADS, SIZE).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        sleep("optimizer", OPTIMIZER)
        return super().step(closure)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow, self.behind = Slow(), SlowBackward()
        self.layers = nn.Sequential(*(Attention() for _ in range(LAYERS)))
    def forward(self, x):
        return self.behind(self.layers(self.slow(x)))

model = Model()
optimizer = Optimizer(model.parameters(), lr=1e-3)
ballast = torch.ones(1000, 1000)
try:
    for batch in DataLoader(Data(), batch_size=BATCH):
        loss = model(batch).square().mean()
        sleep("loss", LOSS)
        loss.backward()
        optimizer.step()
        ballast.double()  # the copy
        sleep("other", OTHER)
        optimizer.zero_grad()
finally:
    with open("slept.json", "w") as file:
        json.dump(slept, file)
"""

MODULES = {"slow": ("forward_exclusive_ms", "forward"), "behind": ("backward_exclusive_ms", "backward")}


def injected() -> str:
    """Return the script with its numbers."""
    text = SCRIPT
    sizes = {"BATCH": BATCH, "HEADS": HEADS, "LENGTH": LENGTH, "SIZE": SIZE, "LAYERS": LAYERS}
    numbers = {name.upper(): value for name, value in INJECTED.items()} | sizes
    head = "".join(f"{name} = {value}\n" for name, value in numbers.items())
    return head + text


def profile(folder: Path, steps: int) -> tuple[dict[str, Any], dict[str, list[float]], int]:
    """Profile the script; return the object, milliseconds slept by phase and step, the line of the copy."""
    script = folder / "injected.py"
    script.write_text(injected(), encoding="utf-8")
    line = 1 + next(i for i, text in enumerate(injected().splitlines()) if "the copy" in text)
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--timed", str(steps)]
    command += ["--tokens-per-step", str(TOKENS), "--peak-flops", "1e9", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    slept = json.loads((folder / "slept.json").read_text())
    slept["data"] = [sum(slept["data"][at : at + BATCH]) for at in range(0, len(slept["data"]), BATCH)]
    # What follows the optimizer belongs to the next step.
    slept["other"].insert(0, 0.0)
    return json.loads(done.stdout), slept, line


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, slept, line = profile(Path(folder), options.steps)
    table = Table(title=f"injected against found, {options.steps} steps")
    for column in ("what", "injected", "found", "ratio", "aim met"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(what: str, wanted: float, got: float, tolerance: float, unit: str) -> None:
        ratio = got / wanted
        met = "yes" if abs(ratio - 1) <= tolerance else "no"
        table.add_row(what, f"{wanted:,.6g} {unit}", f"{got:,.6g} {unit}", f"{ratio:.3f}", met)

    clocked = found["warmup_dropped"] + found["step"]["steps"]
    traced = slice(clocked + 1, clocked + 1 + found["traced_steps"])
    for phase in INJECTED:
        wanted = statistics.median(slept[phase][found["warmup_dropped"] : clocked])
        row(f"sleep in phase {phase}", wanted, found["phases"][phase]["median_ms"], 0.05, "ms")
    modules = {module["name"]: module for module in found["modules"]}
    for name, (key, phase) in MODULES.items():
        row(
            f"sleep in module {name}, {phase}",
            statistics.mean(slept[phase][traced]),
            modules[name][key],
            0.05,
            "ms",
        )
    row("phases of a step, the worst sum", 100, 100 * (1 - found["sum_error"]), 0.02, "%")
    width = HEADS * SIZE
    wanted = 6 * found["parameters"] + 12 * LAYERS * width * LENGTH
    row("operations a token", wanted, found["mfu"] * 1e9 / found["tokens_per_second"], 1e-9, "")
    copies = [c for c in found["copies"] if c["line"].startswith(f"injected.py:{line} ")]
    row(f"elements copied on line {line}", 1e6, sum(c["elements"] for c in copies), 0, "")
    Console().print(table)


if __name__ == "__main__":
    main()
