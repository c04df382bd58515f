"""Profile a script: observe it, read its trace, and combine both into one result."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

from backlight import devices
from backlight.diagnose.profile.controls import control_from_environment
from backlight.diagnose.profile.line_samples import MIN_SAMPLES, line_times, sampling, settle, stack_times
from backlight.diagnose.profile.observer import ObservedProfile, ProfileObserver
from backlight.diagnose.profile.optimizations import find_optimizations
from backlight.diagnose.profile.result import PeakMemory, ProfileResult, write_flame_graph
from backlight.diagnose.profile.step_summary import (
    Attention,
    StepProfile,
    find_attention,
    module_tree,
    optimizer_times,
    summarize_steps,
    throughput,
)
from backlight.distributed import world
from backlight.launch.observe import end_script, explain
from backlight.launch.script import NoTrainingError
from backlight.monitors.steptime.model.bottleneck_limits import BottleneckLimits
from backlight.monitors.steptime.model.step_times import SeriesError
from backlight.monitors.steptime.monitor import GarbagePauses
from backlight.text import count, listed
from backlight.trace.device_peaks import peak_of
from backlight.trace.events import TraceError
from backlight.trace.module_times import Attribution, attribute
from backlight.trace.reader import read_trace
from backlight.trace.step_operators import Operations, read_operations, split


@dataclass(frozen=True)
class ProfileOptions:
    """Extent of a profile: ``steps`` under the clock, then ``traced`` ones under torch's profiler.

    ``trace`` is the path of the trace, None to keep none; ``keep`` also returns its bytes. ``stacks`` records
    a stack with every operation. ``tokens`` are those of a step over all ranks, ``peak`` the FLOP/s of one
    device. ``flame_graph`` is the path for one of the lines. ``quiet`` sends what the script prints to
    standard error.
    """

    steps: int = 30
    traced: int = 10
    trace: Path | None = None
    keep: bool = False
    stacks: bool = False
    tokens: int | None = None
    peak: float | None = None
    flame_graph: Path | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Profile:
    """A profiled script.

    ``operations`` are tables from the trace with whole paths of files, None where none was taken; ``trace``
    are the bytes of its file where requested; ``pauses`` are step and payload of each garbage collection.
    """

    result: ProfileResult
    observed: ObservedProfile
    operations: Operations | None
    trace: bytes
    pauses: tuple[tuple[int, dict[str, Any]], ...]


def profile(script: str, arguments: list[str], options: ProfileOptions, *, module: bool = False) -> Profile:
    """Run a script for as many steps as needed, and return where their time went."""
    # Kineto reports its own starts and stops on standard error otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    rank = world().rank
    with tempfile.TemporaryDirectory(prefix="backlight-profile-") as folder:
        wanted = options.traced > 0 and rank == 0
        path = (options.trace or Path(folder) / "trace.json.gz").absolute() if wanted else None
        observer = ProfileObserver(
            end_script, options.steps, options.traced, path, stacks=options.stacks, arguments=tuple(arguments)
        )
        observed = observer.observed
        pauses: list[tuple[int, dict[str, Any]]] = []
        collector = GarbagePauses(
            lambda _kind, payload, step: pauses.append((step or 0, payload)), map(len, repeat(observed.steps))
        )
        collector.start()
        with control_from_environment() or contextlib.nullcontext():
            code = explain(observer, script, arguments, module=module, quiet=options.quiet, compiled=True)
        collector.stop()
        if not observed.steps:
            raise NoTrainingError(
                f"{script}: ended (exit code {code}) without a step of an optimizer after a backward; "
                "expected a training script",
                code,
            )
        try:
            summary = summarize_steps(observed.steps)
            read = _read_trace(path, observed) if path is not None and observed.traced else None
        except (SeriesError, TraceError) as error:
            raise ValueError(f"{script}: {error}") from None
        kept = path.read_bytes() if read is not None and path is not None and options.keep else b""
    operations, modules, attention = read if read is not None else (None, None, None)
    parameters = {id(p): p for model in observer.forwards.models for p in model.parameters()}
    numbers = sum(p.numel() for p in parameters.values())
    live, unevaluated = observed.live, _unevaluated(options, summary, observed)
    result = ProfileResult(
        script=script,
        arguments=tuple(arguments),
        rank=rank,
        world_size=world().size,
        exit_code=code,
        step=summary.step,
        first_ms=summary.first_ms,
        warmup_dropped=summary.warmup,
        phases=summary.phases,
        sum_error=summary.sum_error,
        device_phases=_device_phases(observed, summary.warmup),
        backwards_per_step=_middle([step.backwards for step in observed.steps]),
        parameters=numbers,
        memory=_peak_memory(),
        optimizations=find_optimizations(live, operations, modules) if live is not None else (),
        tracing_overhead=_overhead(summary, observed),
        trace=str(options.trace) if read is not None and options.trace is not None else None,
        not_measured=tuple(filter(None, (*observed.trouble, summary.trouble, *unevaluated))),
        optimizers=optimizer_times(observed.steps, summary, observed.optimizers),
        **_line_fields(observed, summary),
        **_throughput_fields(summary, options, numbers, attention, modules),
        **(_trace_fields(operations) if operations is not None else {}),
        modules=modules.modules if modules is not None else None,
        module_tree=module_tree(modules.modules, summary, operations.traced_phases)
        if modules is not None and operations is not None
        else None,
        backward_unattributed_ms=modules.unattributed_ms if modules is not None else None,
    )
    if options.flame_graph is not None and rank == 0:
        write_flame_graph(result, options.flame_graph)
    return Profile(result, observed, operations, kept, tuple(pauses))


def _read_trace(path: Path, observed: ObservedProfile) -> tuple[Operations, Attribution, Attention | None]:
    steps = len(observed.traced)
    main, lines = split(read_trace(path), steps)
    operations = read_operations(main, lines if observed.has_lines else None)
    return operations, attribute(main.events, steps), find_attention(main, steps)


def _unevaluated(options: ProfileOptions, summary: StepProfile, observed: ObservedProfile) -> list[str]:
    """Return which lines and findings are not evaluated, because there are too few steps."""
    limits, reasons = BottleneckLimits(), []
    steady = summary.step.steps if summary.step is not None else 0
    if options.keep and steady < limits.steady_steps:
        reasons.append(
            f"findings on phase times: {steady} steady steps, {limits.steady_steps} are needed (--timed)"
        )
    if observed.sampler is not None and summary.step is not None:
        if others := observed.sampler.others:
            reasons.append(
                f"lines of Python to less than {1e3 * observed.sampler.delay_s:g} ms: "
                f"{count(len(others), 'other thread')} ({listed(others)}) may hold the interpreter lock"
            )
        samples = len(settle(observed.sampler.samples, observed.steps, summary))
        if samples < MIN_SAMPLES:
            wanted = math.ceil(len(observed.steps) * MIN_SAMPLES / max(samples, 1))
            reasons.append(
                f"lines: {samples} samples in the steady steps, {MIN_SAMPLES} are needed (--timed {wanted})"
            )
    if options.keep and options.traced and len(observed.traced) < limits.traced_steps:
        reasons.append(
            f"findings on idle time, communication and copies: {len(observed.traced)} traced steps, "
            f"{limits.traced_steps} are needed (--traced {limits.traced_steps})"
        )
    return reasons


def _throughput_fields(
    summary: StepProfile,
    options: ProfileOptions,
    parameters: int,
    attention: Attention | None,
    modules: Attribution | None,
) -> dict[str, Any]:
    if summary.step is None:
        return {}
    peak, device = options.peak, ""
    if peak is None and devices.is_available():
        device = devices.name_of()
        device_peak = peak_of(device)
        peak = None if device_peak is None else device_peak.flops
    rows = modules.modules if modules is not None else ()
    recomputed = {m.name: m.recomputed_ms for m in rows if m.recomputed_ms}
    reached = throughput(
        summary.step.median_ms / 1e3,
        tokens=options.tokens,
        parameters=parameters,
        # Shapes are those of one rank.
        attention=attention.operations * world().size / options.tokens
        if attention is not None and options.tokens
        else None,
        peak=peak,
        world=world().size,
        device=device,
        recomputed=1e-3
        * sum(s for name, s in recomputed.items() if name.rpartition(".")[0] not in recomputed),
    )
    return dataclasses.asdict(reached)


def _line_fields(observed: ObservedProfile, summary: StepProfile) -> dict[str, Any]:
    if observed.sampler is None or summary.step is None:
        return {}
    samples = settle(observed.sampler.samples, observed.steps, summary)
    if len(samples) < MIN_SAMPLES:
        return {}
    return {
        "lines": line_times(samples, summary),
        "stacks": stack_times(samples, summary),
        "sampling": sampling(observed.sampler, samples),
    }


def _trace_fields(operations: Operations) -> dict[str, Any]:
    fields = {field.name: getattr(operations, field.name) for field in dataclasses.fields(operations)}
    fields["copies"] = tuple(
        dataclasses.replace(row, line=row.line.removeprefix(f"{Path.cwd()}{os.sep}"))
        for row in operations.copies
    )
    return fields


def _device_phases(observed: ObservedProfile, warmup: int) -> dict[str, float] | None:
    """Return median milliseconds of the device by phase over the steady steps; None without one of both."""
    steps = observed.device[max(0, warmup - 1) :]  # the first step has no begin on the device
    names = dict.fromkeys(name for step in steps for name in step)
    return {
        str(name): 1e3 * statistics.median(step.get(name, 0.0) for step in steps) for name in names
    } or None


def _peak_memory() -> PeakMemory:
    device = devices.memory()
    if device is not None:
        return PeakMemory(device.peak_allocated, device.capacity, "device")
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return PeakMemory(peak, psutil.virtual_memory().total, "process")


def _overhead(summary: StepProfile, observed: ObservedProfile) -> float | None:
    traced = _middle([step.seconds for step in observed.traced])
    return None if summary.step is None or traced is None else 1e3 * traced / summary.step.median_ms


def _middle(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
