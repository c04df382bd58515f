"""`watch.log(tensor)` in a loop that works on a side stream."""

from __future__ import annotations

import time

import torch
from check import Check
from torch import nn

import backlight

EXPECTED = "each stored value is the one that the stream of the loop has computed, and no step waits for it"
STEPS, BUSY_S = 8, 0.1


def main(check: Check) -> None:
    """Log a tensor that is computed behind work of a tenth of a second."""
    model = nn.Linear(16, 4).to(check.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 16, device=check.kind)
    check.synchronize()
    side = torch.Stream(check.kind)
    longest = 0.0
    with (
        backlight.watch(
            model, optimizer, run=check.folder / "run", flush_interval=0.01, quiet=True, summary=False
        ) as watch,
        side,
    ):
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            check.keep_busy(BUSY_S)
            value = torch.zeros(1, device=check.kind, dtype=torch.bfloat16) + number
            begin = time.perf_counter()
            watch.log(mine=value)
            longest = max(longest, time.perf_counter() - begin)
        side.synchronize()
    stored = backlight.open_run(check.folder / "run").scalar("mine", source="user").values.tolist()
    expected = [float(number) for number in range(1, STEPS + 1)]
    check.expect("stored values", stored, str(expected), holds=stored == expected)
    holds = longest < BUSY_S / 2 or check.simulated is not None
    check.expect("longest call of log, ms", f"{1e3 * longest:.2f}", "below 50, on a GPU", holds=holds)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
