"""What `backlight ls` costs over many runs: seconds of processor time of the command.

The runs are copies of one that a script of 300 steps left. Copies that keep the time of the database are
listed from the summaries in their manifests, the others from their databases.

    OMP_NUM_THREADS=1 python bench/run_list.py --runs 2000
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(300):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


def processor_s(*arguments: str) -> float:
    """Run a command of backlight; return the processor time that it took, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "backlight", *arguments], check=True, stdout=subprocess.DEVNULL
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print the processor time of `backlight ls`, the least of three, of both kinds of copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="backlight-list-") as base:
        script, first, runs = Path(base, "train.py"), Path(base, "first"), Path(base, "runs")
        script.write_text(SCRIPT)
        processor_s("run", "--quiet", "--out", str(first), str(script))
        for number in range(options.runs):
            shutil.copytree(first, runs / f"run-{number}")
        sys.stdout.write(f"no run: {min(processor_s('ls', '--help') for _ in range(3)):.2f} s\n")
        for what in ("from summaries", "from databases"):
            seconds = min(processor_s("ls", str(runs)) for _ in range(3))
            sys.stdout.write(f"{options.runs} runs, {what}: {seconds:.2f} s\n")
            for database in runs.glob("*/attempt-000/rank-00000.db"):
                os.utime(database)
    return 0


if __name__ == "__main__":
    sys.exit(main())
