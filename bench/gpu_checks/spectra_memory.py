"""Memory of 64 spectra jobs, which the worker thread measures on the device.

A caching allocator keeps what a stream has freed for that stream: a job that works on a stream of its own
reserves its memory anew.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from check import Check
from torch import nn

import backlight
from backlight.monitors.spectra.instrument.worker_thread import StepMeasurement

EXPECTED = "reserved memory after 64 jobs is at most 1.1 of that after 3, with replicates on device or host"

JOBS, FIRST, JOB_S, MOST = 64, 3, 20.0, 1.1


def reserved(check: Check, buffer: str) -> list[int]:
    """Return the reserved bytes after each job."""
    width = check.choose(192, 48)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width // 2)).to(
        check.kind
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, width).to(check.kind), torch.randint(width // 2, (32,)).to(check.kind)
    torch.accelerator.empty_cache()
    ended, found = [], []
    measure = StepMeasurement.measure

    def counted(self: StepMeasurement, *arguments: Any) -> Any:
        try:
            return measure(self, *arguments)
        finally:
            ended.append(time.monotonic())

    StepMeasurement.measure = counted
    try:
        with backlight.watch(
            model,
            optimizer,
            run=check.folder / buffer,
            every=1,
            monitors=("spectra",),
            spectra={"buffer": buffer},
            quiet=True,
            summary=False,
        ):
            for number in range(JOBS):
                optimizer.zero_grad()
                for _ in range(4):
                    F.cross_entropy(model(x + torch.rand_like(x)), y).backward()
                optimizer.step()
                limit = time.monotonic() + JOB_S
                while len(ended) <= number and time.monotonic() < limit:
                    time.sleep(0.002)
                check.synchronize()
                found.append(torch.accelerator.memory_reserved())
    finally:
        StepMeasurement.measure = measure
    measured = {event.step for event in backlight.open_run(check.folder / buffer).events("spectra_measured")}
    check.expect(f"{buffer}: measured steps", len(measured), str(JOBS), holds=len(measured) == JOBS)
    return found


def main(check: Check) -> None:
    """Compare the reserved memory after some jobs with that after all."""
    for buffer in ("device", "host"):
        found = [size / 2**20 for size in reserved(check, buffer)]
        first, last = found[FIRST - 1], found[-1]
        expected = f"at most {MOST * first:.2f}; {first:.2f} after {FIRST}"
        holds = last <= MOST * first
        check.expect(f"{buffer}: MiB reserved after {JOBS} jobs", f"{last:.2f}", expected, holds=holds)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
