"""GPT-2 in bfloat16, 200 steps: device time, launches and `cudaHostAlloc` of recorded and of other steps."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from check import Check
from language_model import Training

import backlight
from backlight.measure.stats.fused_rows import fused_rows
from backlight.measure.stats.statistics import why_not_compiled
from backlight.session.sampling import BUDGET, FIRST_S

EXPECTED = (
    "200 steps cost at most 0.3 s and 1 % of device time; a step that is not recorded launches one kernel "
    "more (its loss), a recorded one at most 40 once the kernels for all tensors are compiled, and none "
    "allocates pinned memory"
)
MOST_LAUNCHES = 40
PROFILED, EVERY = 12, 4
# Calls of the CUDA runtime and driver, and of HIP.
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipModuleLaunch",
)
PINNED = frozenset({"cudaHostAlloc", "hipHostMalloc"})


def watch_of(check: Check, training: Training, run: str, **settings: Any) -> Any:
    """Return a watch that prints nothing."""
    return backlight.watch(
        training.model, training.optimizer, run=check.folder / run, quiet=True, summary=False, **settings
    )


def device_ms(check: Check, training: Training, steps: int) -> list[float]:
    """Return the device milliseconds of each step; the host runs ahead."""
    events = [torch.Event(check.kind, enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        training.step()
        event.record()
    check.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def launches(check: Check, training: Training, steps: int) -> list[tuple[int, int]]:
    """Return how many kernels each step launches, and how often it allocates pinned memory."""
    if check.simulated is not None:
        found = []
        for _ in range(steps):
            before = check.simulated.counts(check.simulated.KERNEL).get("MainThread", 0)
            training.step()
            found.append((check.simulated.counts(check.simulated.KERNEL)["MainThread"] - before, 0))
        return found
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            with torch.profiler.record_function(f"step {number}"):
                training.step()
        check.synchronize()
    return counted(profiler.profiler.kineto_results.events(), steps)


def counted(events: Iterable[Any], steps: int) -> list[tuple[int, int]]:
    """Return the launches and the allocations of pinned memory by step, of the events of a profile."""
    events = [*events]
    spans = {
        int(event.name().removeprefix("step ")): (event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith("step ") and event.device_type() == torch.autograd.DeviceType.CPU
    }
    counts: Counter[tuple[int, bool]] = Counter()
    for event in events:
        is_launch = event.name().startswith(LAUNCHES)
        if is_launch or event.name() in PINNED:
            for number, (begin, end) in spans.items():
                counts[number, is_launch] += begin <= event.start_ns() < end
    return [(counts[number, True], counts[number, False]) for number in range(steps)]


def main(check: Check) -> None:
    """Compare the watched training run with an unwatched one, interleaved."""
    training = Training(check)
    for _ in range(5):
        training.step()
    steps = check.choose(200, 20)
    times = {"unwatched": device_ms(check, training, steps // 2)}
    with watch_of(check, training, "timed"):
        times["watched"] = device_ms(check, training, steps)
    times["unwatched"] += device_ms(check, training, steps // 2)
    recorded = {int(step) for step in backlight.open_run(check.folder / "timed").series_steps("gradient")}
    of_recorded = [ms for step, ms in enumerate(times["watched"]) if step in recorded]
    others = [ms for step, ms in enumerate(times["watched"]) if step not in recorded]
    check.figure("recorded steps", f"{len(recorded)} of {steps}")
    plain = statistics.median(times["unwatched"])
    check.figure("device ms of a step, unwatched", f"{plain:.3f}")
    for name, values in (("recorded", of_recorded), ("other", others)):
        if values:
            check.figure(f"device ms of a step, {name}", f"{statistics.median(values):.3f}")
    base_s = sum(times["unwatched"]) / 1e3
    added_s, allowed_s = sum(times["watched"]) / 1e3 - base_s, FIRST_S + BUDGET * base_s
    # Kernels of the simulated device run on cores of the host, and for longer than those of a GPU.
    holds = added_s <= allowed_s or check.simulated is not None
    expected = f"at most {allowed_s:.3f}, on a GPU"
    check.expect(f"device s added to {base_s:.3f} s", f"{added_s:.3f}", expected, holds=holds)

    if check.kind not in {"cuda", "sim"}:
        check.leave_out("launches", f"the calls of the runtime of {check.kind} are not known")
        return
    alone = launches(check, training, 3)[-1]
    with watch_of(check, training, "counted", every=EVERY, monitors=("health",)):
        for _ in range(2 * EVERY):
            training.step()
        fused = fused_rows(next(training.model.parameters()).device)
        if fused is not None:
            fused.wait()
        found = launches(check, training, PROFILED)
    usual, detailed = found[1::EVERY] + found[2::EVERY], found[0::EVERY]
    check.figure("launches of a step, unwatched", alone[0])
    added = max(one[0] for one in detailed) - alone[0]
    check.figure("kernels for all tensors", why_not_compiled() or ("none" if fused is None else "compiled"))
    check.expect(
        "launches that a recorded step adds", added, f"at most {MOST_LAUNCHES}", holds=added <= MOST_LAUNCHES
    )
    most = max(one[0] for one in usual) - alone[0]
    check.expect("launches that another step adds", most, "at most 1", holds=most <= 1)
    if check.simulated is not None:
        check.leave_out("cudaHostAlloc", "the simulated device counts no pinned memory")
        return
    pinned = sum(one[1] for one in found)
    check.expect("cudaHostAlloc in watched steps", pinned, "0", holds=pinned == 0)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
