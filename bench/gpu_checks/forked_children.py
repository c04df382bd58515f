"""Forked children that use the device, of a watched process that has not.

CUDA works in a forked process only where the parent has not asked the driver before, as a watch might.
"""

from __future__ import annotations

import subprocess
import sys

from check import Check

EXPECTED = "a forked child and the workers of a loader compute on the device while the parent is watched"

PROGRAM = """
import multiprocessing, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import backlight

kind, run = sys.argv[1:]

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return float((torch.ones(4, device=kind) * index).sum())

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with backlight.watch(model, optimizer, run=run, every=1, quiet=True, summary=False):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(float((torch.ones(3).to(kind) + 1).sum()) != 6.0)
        finally:
            os._exit(code)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    print("loader", sum(float(batch.sum()) for batch in loader), flush=True)
"""


def main(check: Check) -> None:
    """Run the program in a process of its own."""
    kind = check.kind
    if check.simulated is not None:
        kind = "cpu"
        check.leave_out(
            "children on the device", "the simulated one works in no forked process; they use the host"
        )
    command = [sys.executable, "-c", PROGRAM, kind, str(check.folder / "run")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=50, check=False)
    found = dict(line.split() for line in done.stdout.splitlines())
    check.expect("exit code of the child", found.get("child"), "0", holds=found.get("child") == "0")
    check.expect("sum of the loader", found.get("loader"), "112.0", holds=found.get("loader") == "112.0")
    check.expect("exit code of the parent", done.returncode, "0", holds=done.returncode == 0)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
