"""Profile a script: observe it, read back its trace, and put together what both say."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.parameters import Scope
from backlight.diagnose.profile.ablations import Confirmed, control_of_this_run
from backlight.diagnose.profile.attention_flops import Attention, attention
from backlight.diagnose.profile.observer import Observed, Observer
from backlight.diagnose.profile.optimizations import Optimization, find_optimizations
from backlight.diagnose.profile.step_summary import StepProfile, summarize_steps
from backlight.diagnose.profile.throughput import Throughput, peak_of, throughput
from backlight.distributed import world
from backlight.launch.observe import end_script, explain
from backlight.monitors.steptime.instrument.runtime_info import CoreWait, optimizer_groups, runtime_info
from backlight.monitors.steptime.model.step_times import SeriesError
from backlight.monitors.steptime.monitor import GarbagePauses
from backlight.records import Fingerprint, ParameterRecord
from backlight.trace.events import TraceError
from backlight.trace.module_times import Attribution, attribute
from backlight.trace.reader import read_trace
from backlight.trace.step_operators import Operations, read_operations, split


@dataclass(frozen=True)
class Memory:
    """Bytes: the peak so far, and how much there is; ``of`` says of what."""

    peak: int
    capacity: int
    of: str


@dataclass(frozen=True)
class Profile:
    """A profiled script.

    Attributes
    ----------
    script, arguments, code:
        The script, its arguments, and its own exit code.
    rank:
        Whose profile it is; rank 0 alone is traced.
    steps:
        What the clocked steps say.
    observed:
        The steps themselves.
    throughput:
        Tokens per second and MFU, or why they are not measured; None without a steady step.
    trace_path:
        Where the trace is; None where none was taken or kept.
    trace:
        The trace as its file holds it, where it was asked for; empty otherwise.
    operations, modules:
        Tables from the trace.
    optimizations:
        What is on already.
    description:
        Fingerprint, parameters and circumstances; None where the script ended before any step.
    pauses:
        Pauses by Python's garbage collector: the step in which each fell, and what is known of it.
    memory:
        Peak of the device, or of the process where there is none.
    overhead:
        How much longer a traced step took than a clocked one, as a ratio.
    trouble:
        What could not be measured, and why.
    controls:
        Outcomes of the controls, where they were asked for.
    """

    script: str
    arguments: tuple[str, ...]
    code: int
    rank: int
    steps: StepProfile
    observed: Observed
    throughput: Throughput | None
    trace_path: Path | None
    trace: bytes
    operations: Operations | None
    modules: Attribution | None
    optimizations: tuple[Optimization, ...]
    overhead: float | None
    memory: Memory
    parameters: int
    description: Description | None
    pauses: tuple[tuple[int, dict[str, Any]], ...]
    trouble: tuple[str, ...]
    controls: tuple[Confirmed, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What to take.

    Attributes
    ----------
    steps, traced:
        Steps under the clock, and under torch's profiler after them.
    trace:
        Where the trace goes; None to keep it nowhere.
    keep:
        Also return the trace as its file holds it.
    stacks:
        Record a stack with every operation of the traced steps.
    tokens, peak:
        Tokens per step over all ranks, and FLOP/s of one device, where they are known.
    quiet:
        Send what the script prints to standard error.
    """

    steps: int = 30
    traced: int = 3
    trace: Path | None = None
    keep: bool = False
    stacks: bool = False
    tokens: int | None = None
    peak: float | None = None
    quiet: bool = False


def profile(script: str, arguments: list[str], plan: Plan, *, module: bool = False) -> Profile:
    """Run a script for as many steps as a profile takes, and say where they went.

    Parameters
    ----------
    script, arguments, module:
        As for :func:`backlight.launch.script.launch`.
    plan:
        What to take.

    Raises
    ------
    ValueError
        If no step was seen, or what was seen does not add up.
    """
    # Kineto reports its own starts and stops on standard error otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    rank = world().rank
    with tempfile.TemporaryDirectory(prefix="backlight-profile-") as folder:
        wanted = plan.traced > 0 and rank == 0
        path = (plan.trace or Path(folder) / "trace.json.gz").absolute() if wanted else None
        describe = functools.partial(_describe, arguments=tuple(arguments), waiting=CoreWait())
        observer = Observer(end_script, plan.steps, plan.traced, path, stacks=plan.stacks, describe=describe)
        pauses: list[tuple[int, dict[str, Any]]] = []
        collector = GarbagePauses(
            lambda _kind, payload, step: pauses.append((step or 0, payload)),
            lambda: len(observer.observed.steps),
        )
        controlled = control_of_this_run() or contextlib.nullcontext()
        collector.start()
        with controlled:
            code = explain(observer, script, arguments, module=module, quiet=plan.quiet, compiled=True)
        collector.stop()
        observed = observer.observed
        if not observed.steps:
            raise ValueError(
                f"{script}: ended (exit code {code}) without a step of an optimizer after a backward; "
                "expected a training"
            )
        try:
            summary = summarize_steps(
                [step.seconds for step in observed.steps],
                [step.phases for step in observed.steps],
                [step.separated for step in observed.steps],
            )
            read = _read(path, observed) if path is not None and observed.traced else None
        except (SeriesError, TraceError) as error:
            raise ValueError(f"{script}: {error}") from None
        kept = path.read_bytes() if read is not None and path is not None and plan.keep else b""
    operations, modules, calls = read if read is not None else (None, None, None)
    parameters = {id(p): p for model in observer.trained.models for p in model.parameters()}
    count = sum(p.numel() for p in parameters.values())
    live = observed.live
    return Profile(
        script=script,
        arguments=tuple(arguments),
        code=code,
        rank=rank,
        steps=summary,
        observed=observed,
        throughput=_throughput(summary, plan, count, calls, modules),
        trace_path=plan.trace if read is not None else None,
        trace=kept,
        operations=operations,
        modules=modules,
        optimizations=find_optimizations(live, operations, modules) if live is not None else (),
        overhead=_overhead(summary, observed),
        memory=_memory(),
        parameters=count,
        description=observed.description,
        pauses=tuple(pauses),
        trouble=tuple(observed.trouble),
    )


@dataclass(frozen=True)
class Description:
    """What the live training was when its clocked steps were over."""

    fingerprint: Fingerprint
    records: tuple[ParameterRecord, ...]
    circumstances: dict[str, Any]


def _describe(scope: Scope, arguments: tuple[str, ...], waiting: CoreWait) -> Description:
    groups = [group for optimizer in scope.optimizers() for group in optimizer_groups(optimizer)]
    facts = runtime_info(groups, waiting)
    return Description(take_fingerprint(scope, arguments), tuple(scope.table.records), facts)


def _read(path: Path, observed: Observed) -> tuple[Operations, Attribution, Attention | None]:
    steps = len(observed.traced)
    main, lines = split(read_trace(path), steps)
    return (
        read_operations(main, lines if observed.lined else None),
        attribute(main.events, steps),
        attention(main, steps),
    )


def _throughput(
    summary: StepProfile, plan: Plan, count: int, calls: Attention | None, modules: Attribution | None
) -> Throughput | None:
    if summary.step is None:
        return None
    peak, device = plan.peak, ""
    if peak is None and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        peak = peak_of(device)
    # Shapes are those of one rank.
    each = calls.operations * world().size / plan.tokens if calls is not None and plan.tokens else None
    outermost = [m for m in modules.modules if m.recomputed] if modules is not None else []
    inner = {m.name for m in outermost}
    return throughput(
        summary.step.median,
        tokens=plan.tokens,
        parameters=count,
        attention=each,
        peak=peak,
        world=world().size,
        device=device,
        recomputed=sum(m.recomputed for m in outermost if m.name.rpartition(".")[0] not in inner),
    )


def _memory() -> Memory:
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return Memory(torch.cuda.max_memory_allocated(), int(whole), "device")
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, pages, "process")


def _overhead(summary: StepProfile, observed: Observed) -> float | None:
    if summary.step is None or not observed.traced:
        return None
    times = sorted(step.seconds for step in observed.traced)
    return times[len(times) // 2] / summary.step.median
