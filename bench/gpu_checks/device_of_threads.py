"""The device of every thread, and one process per rank in `nvidia-smi`.

A thread that asks for an event before it has chosen a device opens a context on device 0, which costs some
hundred MB there: `nvidia-smi` then lists a rank twice. Two ranks share the device where there is only one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from check import Check
from torch import nn

import backlight
from backlight import devices
from backlight.threads import is_own_thread

EXPECTED = "every thread of backlight asks on the device of its event; nvidia-smi lists one process per rank"
RANKS = 2

RANK = """
import os, sys
kind, rank, folder = sys.argv[1], int(os.environ["RANK"]), sys.argv[2]
if kind == "sim":
    import simulated
import torch
torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
)
import backlight
model = torch.nn.Linear(64, 64, device=kind)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with backlight.watch(model, optimizer, run=folder + "/run", every=1, quiet=True, summary=False):
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(8, 64, device=kind)).square().mean().backward()
        optimizer.step()
    torch.accelerator.synchronize()
    print("trained", flush=True)
    sys.stdin.read()
"""


def threads(check: Check, index: int) -> None:
    """Train on one device while another is the current one; count who asks for which event where."""
    asked: Counter[tuple[str, bool]] = Counter()
    query = devices._query

    def recorded(event: torch.Event) -> bool:
        found = query(event)
        if is_own_thread():  # it stays on the device on which it asked
            right = torch.accelerator.current_device_index() == event.device.index
            name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
            asked[name, right] += 1
        return found

    device = torch.device(check.kind, index)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 32).to(device), torch.randint(4, (8,)).to(device)
    devices._query = recorded
    try:
        with backlight.watch(
            model,
            optimizer,
            run=check.folder / f"run-{index}",
            every=1,
            flush_interval=0.01,
            quiet=True,
            summary=False,
        ):
            for _ in range(20):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                time.sleep(0.005)  # the writer asks while steps are taken
    finally:
        devices._query = query
    names = ", ".join(f"{name} {count} times" for (name, _), count in asked.items())
    wrong = sum(count for (_, right), count in asked.items() if not right)
    check.expect(f"device {index}: questions of threads elsewhere", wrong, "0", holds=wrong == 0)
    check.expect(f"device {index}: threads that asked", names or "none", "some", holds=bool(asked))


def processes() -> list[str]:
    """Return a line for each process and GPU that it has a context on."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.SubprocessError:  # not permitted here
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def ranks(check: Check) -> None:
    """Train on two ranks, and list the processes of the GPUs while both are alive."""
    lists = shutil.which("nvidia-smi") is not None
    before = processes() if lists else []
    command = [sys.executable, "-c", RANK, check.kind, str(check.folder)]
    environment = {**os.environ, "WORLD_SIZE": str(RANKS)}
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    trained = [str(process.stdout and process.stdout.readline()).strip() for process in started]
    listed = processes() if lists else []
    for process in started:
        process.communicate()
    check.expect(
        "ranks that trained", trained.count("trained"), str(RANKS), holds=set(trained) == {"trained"}
    )
    codes = [process.returncode for process in started]
    check.expect("exit codes", codes, str([0] * RANKS), holds=codes == [0] * RANKS)
    more = len(listed) - len(before)
    if not lists or not listed:
        check.leave_out("nvidia-smi", "it is missing" if not lists else "it lists no process here")
        return
    for line in listed:
        check.figure("nvidia-smi", line)
    check.expect("processes of the ranks", more, str(RANKS), holds=more == RANKS)


def main(check: Check) -> None:
    """Ranks first: this process has no context yet."""
    ranks(check)
    for index in range(torch.accelerator.device_count()):
        threads(check, index)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
