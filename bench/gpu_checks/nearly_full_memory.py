"""A device whose memory is nearly full: what watching adds to the peak, and retries of the allocator."""

from __future__ import annotations

import torch
from check import Check
from language_model import Training

import backlight
from backlight import devices

EXPECTED = "every recorded step adds at most 70 MiB to the peak, and the allocator never retries"
MOST_MIB, LEFT_MIB = 70, 96
"""Memory that watching may add to the peak, and that is left free."""


def peak_mib(training: Training, steps: int) -> float:
    """Train some steps; return the peak of the allocated memory."""
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(steps):
        training.step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() / 2**20


def main(check: Check) -> None:
    """Train alone, then leave little memory free, and train watched."""
    training = Training(check)
    steps = check.choose(10, 4)
    alone = [peak_mib(training, steps) for _ in range(2)][-1]
    device = torch.device(check.kind, torch.accelerator.current_device_index())
    free, memory = devices.free_memory(device), devices.memory()
    if free is None or memory is None:
        check.skip(f"the back-end of {check.kind} reports no free memory")
    ballast = torch.empty(max(0, free - LEFT_MIB * 2**20), dtype=torch.uint8, device=check.kind)
    before = torch.accelerator.memory_stats()["num_alloc_retries"]
    with backlight.watch(
        training.model,
        training.optimizer,
        run=check.folder / "run",
        every=1,
        health={"histogram": True},
        quiet=True,
        summary=False,
    ):
        watched = peak_mib(training, steps) - ballast.numel() / 2**20
    retries = torch.accelerator.memory_stats()["num_alloc_retries"] - before
    recorded = len(backlight.open_run(check.folder / "run").series_steps("gradient"))
    check.figure("memory of the device, MiB", f"{memory.capacity / 2**20:.0f}, {LEFT_MIB} of them left free")
    check.figure("peak of an unwatched step, MiB", f"{alone:.1f}")
    added = watched - alone
    check.expect("MiB that watching adds", f"{added:.2f}", f"at most {MOST_MIB}", holds=added <= MOST_MIB)
    check.expect("retries of the allocator", retries, "0", holds=retries == 0)
    check.expect("recorded steps", recorded, str(steps), holds=recorded == steps)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
