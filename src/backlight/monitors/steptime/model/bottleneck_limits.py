"""Limits of the rule ``bottleneck``, and what they make of a share of the time. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.findings.limits import limit
from backlight.monitors.steptime.model.evidence import (
    FORMULAS,
    MEASURED_STEPS,
    BusyLimits,
    core_wait,
    is_busy,
    percent,
)
from backlight.records import Severity
from backlight.store.read.run import Run
from backlight.trace.step_limits import LIMITS, StepLimits, is_slow


@dataclass(frozen=True)
class BottleneckLimits(BusyLimits):
    """Limits of the rule ``bottleneck``."""

    data_share: float = limit(
        LIMITS.data, "share of a steady step spent waiting for data", source=FORMULAS, high=1.0
    )
    slow_share: float = limit(
        LIMITS.slow,
        "share of the time that data, waits for the device, saving or launches take without a profile",
        high=1.0,
    )
    slow_low: float = limit(
        LIMITS.slow_low, "lower end of the interval of that share below which it is a hint", high=1.0
    )
    measured_steps: int = limit(
        MEASURED_STEPS, "steps without the first that the share of the wait for data needs", low=5
    )
    data_floor: float = limit(
        0.01,
        "seconds of that wait in a step below which it is a hint: such a step is short anyway",
        high=60.0,
    )
    data_match: float = limit(
        0.5, "share of the wait that a cached batch must save before data is the cause", high=1.0
    )
    traced_steps: int = limit(
        10, "traced steps that a claim from a trace needs: fewer show no variance", low=6
    )
    launch_idle: float = limit(LIMITS.idle, "share of a step in which the device is idle", high=1.0)
    launch_host: float = limit(
        LIMITS.host, "share of that idle time in which the device waits for the host to launch", high=1.0
    )
    exposed_share: float = limit(
        LIMITS.exposed, "share of a step in which the device communicates and computes nothing", high=1.0
    )
    copy_share: float = limit(
        LIMITS.copy,
        "share of a step that copies from one line take: a well-kept model casts and lays out in about 1 %",
        high=1.0,
    )
    optimizer_share: float = limit(
        LIMITS.optimizer,
        "share of a step in the optimizer; a fused update of a usual model takes 1 to 5 %",
        high=1.0,
    )
    optimizer_floor: float = limit(
        5e-3,
        "seconds in the optimizer below which nothing is gained: a tiny step is bound by Python's calls",
        high=10.0,
    )
    pause_samples: int = limit(
        20, "samples in saving or evaluation, four a second, below which nothing is gained", low=3
    )
    epochs: int = limit(3, "epochs, all of whose steps are recorded, that begin with a wait", low=2)
    epoch_share: float = limit(0.2, "share of such epochs that is the wait for the first batch", high=1.0)
    epoch_wait: float = limit(0.05, "seconds of that wait below which nothing is gained", high=60.0)
    threads_per_core: float = limit(1.25, "threads that compute on one machine, over its cores", low=1.0)
    waited_share: float = limit(
        0.05, "share of the run that the training thread waited for a core, where that is counted", high=1.0
    )
    straggler_share: float = limit(
        0.1, "share of a step that a rank works longer than the median of the ranks", high=1.0
    )


def severity_of(
    run: Run,
    limits: BottleneckLimits,
    share: float,
    low: float,
    *,
    in_thread: bool = False,
    is_steady: bool = True,
) -> Severity:
    """Return a warning for what is slow by its share and the lower end of its interval, else a hint.

    On a busy machine times are those of the machine: whatever takes them is a hint. ``in_thread``: the thread
    that trains does it itself, so what remains without all of its waits for a core is not the machine's. The
    whole interval must be slow then, and where steps are not ``is_steady``.
    """
    is_machine, slow_low = is_busy(run, limits), limits.slow_low if is_steady else limits.slow_share
    if is_machine and in_thread and (waited := core_wait(run)) is not None:
        share, low, is_machine, slow_low = share - waited, low - waited, False, limits.slow_share
    slow = is_slow(share, low, StepLimits(slow=limits.slow_share, slow_low=slow_low))
    return Severity.WARNING if slow and not is_machine else Severity.INFO


def on_a_busy_machine(run: Run, limits: BottleneckLimits) -> str:
    """Return a sentence where other programs took the cores, else nothing."""
    waited = core_wait(run)
    if waited is None or not is_busy(run, limits):
        return ""
    on_core = f"waited for a core {percent(waited)} of the time"
    return f" The thread that trains {on_core}: a quiet machine may show less."
