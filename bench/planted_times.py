"""Planted times, operations and copies against what ``backlight profile`` says of them.

A script sleeps a known time in each phase and in two modules, has attention of known size, and copies on
a known line; it is profiled as a user would. Aim: sleeps within 5 % in phase and module, operations
exactly, the copy at its line, phases that add up to the step within 2 %.

    OMP_NUM_THREADS=1 python bench/planted_times.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLANTED = {"data": 24.0, "forward": 60.0, "loss": 30.0, "backward": 50.0, "optimizer": 40.0, "other": 35.0}
"""Milliseconds of sleep in each phase."""

BATCH, HEADS, LENGTH, SIZE, LAYERS, TOKENS = 2, 2, 16, 8, 3, 32

SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index):
        time.sleep(DATA / 2e3)
        return torch.ones(LENGTH, HEADS * SIZE)

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD / 1e3)
        return grad

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(FORWARD / 1e3)
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
        time.sleep(OPTIMIZER / 1e3)
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
for batch in DataLoader(Data(), batch_size=BATCH):
    loss = model(batch).square().mean()
    time.sleep(LOSS / 1e3)
    loss.backward()
    optimizer.step()
    ballast.double()  # the copy
    time.sleep(OTHER / 1e3)
    optimizer.zero_grad()
"""

MODULES = {"slow": ("forward_exclusive_ms", "forward"), "behind": ("backward_exclusive_ms", "backward")}


def planted() -> str:
    """Return the script with its numbers."""
    text = SCRIPT
    sizes = {"BATCH": BATCH, "HEADS": HEADS, "LENGTH": LENGTH, "SIZE": SIZE, "LAYERS": LAYERS}
    numbers = {name.upper(): value for name, value in PLANTED.items()} | sizes
    head = "".join(f"{name} = {value}\n" for name, value in numbers.items())
    return head + text


def profile(folder: Path, steps: int) -> tuple[dict[str, Any], int]:
    """Profile the script; return the object, and the line of the copy."""
    script = folder / "planted.py"
    script.write_text(planted(), encoding="utf-8")
    line = 1 + next(i for i, text in enumerate(planted().splitlines()) if "the copy" in text)
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--steps", str(steps)]
    command += ["--tokens-per-step", str(TOKENS), "--peak-flops", "1e9", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), line


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, line = profile(Path(folder), options.steps)
    table = Table(title=f"planted against found, {options.steps} steps")
    for column in ("what", "planted", "found", "ratio", "aim met"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(what: str, wanted: float, got: float, tolerance: float, unit: str) -> None:
        ratio = got / wanted
        met = "yes" if abs(ratio - 1) <= tolerance else "no"
        table.add_row(what, f"{wanted:,.6g} {unit}", f"{got:,.6g} {unit}", f"{ratio:.3f}", met)

    for phase, wanted in PLANTED.items():
        row(f"sleep in phase {phase}", wanted, found["phases"][phase]["median_ms"], 0.05, "ms")
    modules = {module["name"]: module for module in found["modules"]}
    for name, (key, phase) in MODULES.items():
        row(f"sleep in module {name}, {phase}", PLANTED[phase], modules[name][key], 0.05, "ms")
    row("phases of a step, the worst sum", 100, 100 * (1 - found["sum_error"]), 0.02, "%")
    width = HEADS * SIZE
    wanted = 6 * found["parameters"] + 12 * LAYERS * width * LENGTH
    row("operations a token", wanted, found["mfu"] * 1e9 / found["tokens_per_second"], 1e-9, "")
    copies = [c for c in found["copies"] if c["line"].startswith(f"planted.py:{line} ")]
    row(f"elements copied on line {line}", 1e6, sum(c["elements"] for c in copies), 0, "")
    Console().print(table)


if __name__ == "__main__":
    main()
