"""NCCL with a world of 1: flight recorder, RAS, and a stall that names its collective.

Where there is no NCCL the same program runs over gloo on two ranks, of which one is late: the diagnosis is
the same code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from check import Check

import backlight
from backlight.monitors.stalls.instrument.collectives import _NAMES, _dump
from backlight.watchdog.flight_recorder import parse_dump, read_ras

EXPECTED = "the recorder names the all_reduce with its sizes, RAS answers, and the stall names the all_reduce"
STALL_S, HANG_S, LIMIT_S = 2.0, 30.0, 45.0

PROGRAM = """
import sys, time
kind, backend, folder, rank, world, seconds = sys.argv[1:]
import torch, torch.distributed as dist
dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=int(rank), world_size=int(world))
device = kind if backend == "nccl" else "cpu"
model = torch.nn.Linear(8, 8, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = torch.ones(16, device=device)
from faults.injection import wait_for_watchdog
wait_for_watchdog()
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    dist.all_reduce(total)
    if step == 4:
        if backend == "nccl":  # what the device still has to do comes before the collective
            torch.cuda._sleep(int(float(seconds) * 1.5e9))
        elif rank == "1":
            time.sleep(float(seconds))
        dist.all_reduce(total)
        print(total.sum().item(), flush=True)
"""


def recorder(check: Check) -> None:
    """Read what the flight recorder and RAS know of one collective of this process."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch 2.9 records nothing without it
    dist.init_process_group("nccl", init_method=f"file://{check.folder}/one", rank=0, world_size=1)
    total = torch.ones(4, 5, device=check.kind)
    dist.all_reduce(total)
    check.synchronize()
    time.sleep(1.0)  # NCCL's own thread finds that it has ended
    dumped = next((dump for dump in map(_dump, _NAMES) if dump.get("entries")), {})
    check.figure("keys of an entry", sorted(dumped["entries"][-1]) if dumped else "none")
    records = parse_dump(0, dumped).records if dumped else ()
    text = records[-1].text if records else "none"
    check.expect(
        "last collective", text, "all_reduce(4x5 float32) #N ...", holds=text.startswith("all_reduce(4x5")
    )
    status = read_ras(os.environ)
    check.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    answered = status.version if status is not None else "none"
    has_ras = torch.cuda.nccl.version() >= (2, 24)
    check.expect(
        "version that RAS reports",
        answered,
        "as above, from 2.24 on",
        holds=status is not None or not has_ras,
    )
    dist.destroy_process_group()


def stall(check: Check, backend: str) -> None:
    """Let a collective hang, and read what the run says of it meanwhile."""
    world = 1 if backend == "nccl" else 2
    script = check.folder / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    run = check.folder / "run"
    backlight_run = ["-m", "backlight", "run", "--quiet", "--stall", str(STALL_S), "--out", str(run)]
    started = []
    for rank in range(world):
        arguments = [check.kind, backend, str(check.folder), str(rank), str(world), str(HANG_S)]
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "TORCH_FR_BUFFER_SIZE": "2000",
        }  # fmt: skip
        command = [sys.executable, *backlight_run, str(script), *arguments]
        started.append(subprocess.Popen(command, env=environment, start_new_session=True))
    findings = []
    deadline = time.monotonic() + LIMIT_S
    while not findings and time.monotonic() < deadline and any(one.poll() is None for one in started):
        if (run / "manifest.json").exists():
            findings = [f for f in backlight.open_run(run).stored_findings() if f.rule == "stall"]
        time.sleep(0.2)
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = " ".join(f"{finding.title}: {finding.detail}" for finding in findings) or "none"
    check.expect("stall", text, "one that names all_reduce", holds="all_reduce" in text)


def main(check: Check) -> None:
    """Stall first: its process has the device for itself."""
    has_nccl = check.kind == "cuda" and dist.is_nccl_available()
    stall(check, "nccl" if has_nccl else "gloo")
    if has_nccl:
        recorder(check)
    else:
        check.leave_out("NCCL", f"this torch has none for {check.kind}; the stall is one of gloo")


if __name__ == "__main__":
    Check.run(main, EXPECTED)
