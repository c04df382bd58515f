"""Overhead of a step where the host runs ahead of the device, and where it waits for every loss."""

from __future__ import annotations

from check import Check

EXPECTED = "watched over unwatched time at most 1.01 above the control, in both loops"


def main(check: Check) -> None:
    """Compare interleaved blocks of steps, as ``bench/device_overhead.py`` does."""
    from bench import device_overhead

    training = device_overhead.Training(check.kind, check.keep_busy)
    if check.is_small:
        device_overhead.FIRST, device_overhead.BLOCK = 20, 5
    pairs = check.choose(16, 4)
    for waits, loop in ((False, "host ahead"), (True, "host waits")):
        watched, control = device_overhead.compare(training, pairs, waits=waits)
        added = watched - control
        # Kernels of the simulated device run on the cores of the host, at the mercy of its load.
        holds = added <= 0.01 or check.simulated is not None
        check.expect(f"{loop}: added", f"{added:+.4f}", "at most 0.01, on a GPU", holds=holds)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
