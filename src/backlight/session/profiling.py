"""Profile a script: observe it, read back its trace, and put together what both say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from backlight.session.explaining import end_script, explain
from backlight.steptime.profile.attribution import Attribution, attribute
from backlight.steptime.profile.observer import Observed, Observer
from backlight.steptime.profile.summary import StepProfile, summarize_steps
from backlight.steptime.profile.throughput import Throughput, peak_of, throughput
from backlight.steptime.steady import SeriesError
from backlight.steptime.trace.events import Trace
from backlight.steptime.trace.reader import read_trace


@dataclass(frozen=True)
class Profile:
    """A profiled script.

    Attributes
    ----------
    code:
        The script's own exit code.
    steps:
        What the clocked steps say.
    throughput:
        Tokens per second and MFU, or why they are not measured; None without a steady step.
    trace, trace_path:
        The traced steps; None where none was traced.
    modules:
        Times by module from the trace.
    overhead:
        How much longer a traced step took than a clocked one, as a ratio.
    trouble:
        What could not be measured, and why.
    """

    code: int
    steps: StepProfile
    throughput: Throughput | None
    trace: Trace | None
    trace_path: Path | None
    modules: Attribution | None
    overhead: float | None
    parameters: int
    trouble: tuple[str, ...]


def profile(
    script: str,
    arguments: list[str],
    *,
    module: bool,
    steps: int,
    traced: int,
    trace: Path | None,
    tokens: int | None = None,
    peak: float | None = None,
    quiet: bool = False,
) -> Profile:
    """Run a script for as many steps as a profile takes, and say where they went.

    Parameters
    ----------
    script, arguments, module:
        As for :func:`backlight.session.launcher.launch`.
    steps, traced:
        Steps under the clock, and under torch's profiler after them.
    trace:
        Where the trace goes.
    tokens, peak:
        Tokens per step over all ranks, and FLOP/s of one device, where they are known.
    quiet:
        Send what the script prints to standard error.

    Raises
    ------
    ValueError
        If no step was seen.
    """
    # Kineto reports its own starts and stops otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    observer = Observer(end_script, steps, traced, trace)
    code = explain(observer, script, arguments, module=module, quiet=quiet)
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
    except SeriesError as error:
        raise ValueError(f"{script}: {error}") from None
    parameters = {id(p): p for model in observer.models for p in model.parameters()}
    count = sum(p.numel() for p in parameters.values())
    read = read_trace(trace) if trace is not None and observed.traced else None
    return Profile(
        code=code,
        steps=summary,
        throughput=_throughput(summary, tokens, count, peak),
        trace=read,
        trace_path=trace if read is not None else None,
        modules=None if read is None else attribute(read.events, len(observed.traced)),
        overhead=_overhead(summary, observed),
        parameters=count,
        trouble=tuple(observed.trouble),
    )


def _throughput(
    summary: StepProfile, tokens: int | None, count: int, peak: float | None
) -> Throughput | None:
    if summary.step is None:
        return None
    if peak is None and torch.cuda.is_available():
        peak = peak_of(torch.cuda.get_device_name())
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return throughput(
        summary.step.median, tokens=tokens, parameters=count, attention=None, peak=peak, world=world
    )


def _overhead(summary: StepProfile, observed: Observed) -> float | None:
    if summary.step is None or not observed.traced:
        return None
    times = sorted(step.seconds for step in observed.traced)
    return times[len(times) // 2] / summary.step.median
