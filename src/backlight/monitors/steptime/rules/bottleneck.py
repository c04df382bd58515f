"""Rule ``bottleneck``: what takes the time of a step, such as data, launches, copies or a late rank."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from backlight.findings.phrases import optimizer_name
from backlight.monitors.steptime.model.bottleneck_limits import (
    BottleneckLimits,
    on_a_busy_machine,
    severity_of,
)
from backlight.monitors.steptime.model.evidence import (
    StoredProfile,
    info_evidence,
    is_busy,
    measured_phases,
    percent,
    phase_evidence,
    read_profile,
    read_runtime_info,
    samples_evidence,
    scalar_evidence,
    steady_phases,
)
from backlight.monitors.steptime.model.machine import device_idle
from backlight.monitors.steptime.model.step_line import (
    LEAST_SAMPLES,
    main_line,
    sampled_lines,
    waits_for_batches,
)
from backlight.monitors.steptime.model.step_times import (
    OPTIMIZER_PREFIX,
    PREFIX,
    Floats,
    PhaseTimes,
    optimizer_seconds,
    read_phases,
)
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.format.schema import SAMPLED_BATCH
from backlight.store.read.run import Event, Run
from backlight.text import count, duration
from backlight.trace.step_limits import (
    HOST_CAUSES,
    Limit,
    StepLimits,
    host_share,
    limit_of,
    lower_median,
    lower_share,
)

CONTROL = "cached batch"
"""Name of the control that repeats one batch."""

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch that have a fused implementation on every device."""

COPIES = frozenset({"to", "cuda", "copy_"})
"""Functions in which a host copies to the device, and may wait for it."""

SHARED = frozenset({Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER})
"""Phases in which collectives may wait for other ranks: their time is not only a rank's own work."""


@rule("bottleneck", monitor="steptime", limits=BottleneckLimits, is_statistic=True)
def bottleneck(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find what takes the time of a steady step; data, device and copies from a stored profile."""
    of_a_profile = (_launches, _communication, _copies)
    of_loader, of_samples = (_data, _epochs, _iterators), (_device_waits, _pauses)
    of_the_rest = (_optimizer, _anomaly, _threads, _late_rank)
    for find in (*of_loader, *of_samples, *of_a_profile, *of_the_rest):
        yield from find(run, limits)


def _data(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find a share of the steps in the data loader, and whether the control shows that it costs time.

    A step may wait for its loader because it is over early, or because something else holds the processor;
    only a step that becomes faster with a cached batch is bound by data.
    """
    table, info = measured_phases(run, limits, limits.measured_steps), read_runtime_info(run)
    if table is None:
        return
    lines = sampled_lines(run)
    waits = waits_for_batches(table, lines)
    between = table.phase(waits.phase)
    waited = table.phase(Phase.DATA) + between * waits.share
    share, seconds = float(np.median(waited / table.total)), float(np.median(waited))
    if share <= (limits.slow_share if read_profile(run) is None else limits.data_share):
        return
    low = lower_median(((table.phase(Phase.DATA) + between * waits.low) / table.total).tolist())
    at = main_line(lines, frozenset({Phase.DATA}))
    evidence = [phase_evidence(table, Phase.DATA if table.phase(Phase.DATA).any() else waits.phase)]
    if waits.share:
        evidence.append(samples_evidence(run, waits.share))
    wait = f"Waiting for data takes {percent(share)} of a step ({len(table.steps)} steps)"
    if at is not None:
        wait += f", mostly at {at.short}"
    control = _control(run, share)
    if control is None:
        title = f"Waiting for data takes {percent(share)} of a step"
        detail = (
            f"{wait}. Whether the step would be faster without the wait is not known: no control decided "
            f"it. Expected gain: at most {percent(share)} of a step.{on_a_busy_machine(run, limits)}"
        )
        fix = (
            "Run `backlight profile --confirm` on the same script: it repeats the steps with a cached batch."
        )
    else:
        data_evidence, saved = control
        if saved < limits.data_match * share:
            return  # the control refutes it: the time is spent elsewhere all the same
        evidence.append(data_evidence)
        title = f"The step is bound by data loading: {percent(saved)} shorter with a cached batch"
        detail = (
            f"{wait}, and with a cached batch a step is {percent(saved)} shorter: data loading is the "
            f"bottleneck. Expected gain: {percent(min(saved, share))} of a step."
        )
        fix = (
            "Raise num_workers and prefetch_factor, set persistent_workers, or decode the data ahead of "
            "training; then compare both runs."
        )
    is_loaded_here = info is not None and info.payload.get("workers") == 0
    is_steady = steady_phases(run, limits) is not None
    severity = severity_of(run, limits, share, low, in_thread=is_loaded_here, is_steady=is_steady)
    yield Finding(
        severity=severity if seconds >= limits.data_floor else Severity.INFO,
        title=title,
        detail=detail,
        subject=Subject(phase=Phase.DATA, step=int(table.steps[0]), line=None if at is None else at.line),
        evidence=tuple(evidence),
        fix=fix,
        refuted_if="a run with a cached batch, all else equal, is not faster by at least half of the wait.",
    )


def _device_waits(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find lines at which the host waits for the device, and how much of the time that costs.

    A host that waits costs nothing as long as the device computes: only its idle time does.
    """
    lines = sampled_lines(run)
    whole = sum(line.samples for line in lines)
    waiting = [line for line in lines if line.waits and line.waits != SAMPLED_BATCH]
    part = sum(line.samples for line in waiting)
    if part < LEAST_SAMPLES or part <= limits.slow_share * whole:
        return
    at = max(waiting, key=lambda line: line.samples)
    share, idle = part / whole, device_idle(run)
    copies = sum(line.samples for line in waiting if line.waits in COPIES) * 2 > part
    cost = 0.0 if idle is None else min(share, idle)
    does = "copies" if copies else "waits for the device"
    gain = (
        "Expected gain: not known, as the idle time of the device is not: while it computes, a wait is free."
        if idle is None
        else f"The device is idle for {percent(idle)} of the time. Expected gain: at most {percent(cost)}."
    )
    fix = "Read the value every few steps, or after the next step was launched; keep sums on the device."
    if copies:
        fix = "Copy from pinned memory with `non_blocking=True`, ahead of the step that needs it."
    yield Finding(
        severity=severity_of(run, limits, cost, min(lower_share(part, whole), cost)),
        title=f"The host {does} in `{at.waits}()` for {percent(share)} of the time",
        detail=(
            f"In {percent(share)} of {count(whole, 'sample')} the training thread was in a call that {does}, "
            f"mostly `{at.waits}()` at {at.short}. {gain}{on_a_busy_machine(run, limits)}"
        ),
        subject=Subject(line=at.line),
        evidence=(samples_evidence(run, share),),
        fix=fix,
        refuted_if="the device is busy all the time: `backlight profile` shows its idle time.",
    )


def _pauses(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find saving and evaluation that take much of a run; an evaluation is as long as its user wants it."""
    lines = sampled_lines(run)
    whole = sum(line.samples for line in lines)
    for phase, what in ((Phase.CHECKPOINT, "Saving"), (Phase.EVALUATION, "Evaluation")):
        part = sum(line.samples for line in lines if line.phase == phase)
        if part < limits.pause_samples or part <= limits.slow_share * whole:
            continue
        at, share = main_line(lines, frozenset({phase})), part / whole
        severity = severity_of(run, limits, share, lower_share(part, whole))
        where = "" if at is None else f", mostly at {at.short}"
        fix = "Evaluate less often, on fewer batches, or with a larger batch."
        if phase is Phase.CHECKPOINT:
            fix = "Save less often, or in another process (`torch.distributed.checkpoint.async_save`)."
        yield Finding(
            severity=severity if phase is Phase.CHECKPOINT else Severity.INFO,
            title=f"{what} takes {percent(share)} of the run",
            detail=(
                f"{what} takes {percent(share)} of the time since the first backward pass{where} ("
                f"{count(part, 'sample')} of {whole:,}). Expected gain: at most {percent(share)} of the run."
                f"{on_a_busy_machine(run, limits)}"
            ),
            subject=Subject(phase=phase, line=None if at is None else at.line),
            evidence=(samples_evidence(run, share),),
            fix=fix,
            refuted_if=f"a run without the {what.lower()} takes as long.",
        )


def _epochs(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find epochs a large part of which is the wait for their first batch, longer than for any other."""
    table, batch = read_phases(run), run.scalar("batch")
    if table is None:
        return
    firsts = batch.steps[(batch.values == 0) & (batch.steps > 0)]
    rows = np.searchsorted(table.steps, firsts[np.isin(firsts, table.steps)])
    whole = [(a, b) for a, b in itertools.pairwise(rows) if table.steps[b] - table.steps[a] == b - a > 1]
    if len(whole) < limits.epochs:
        return
    data, total = table.phase(Phase.DATA), table.total
    waits = np.array([data[a] for a, _ in whole])
    longest = max(float(np.median(data[a + 1 : b])) for a, b in whole)
    share = float(waits.sum() / sum(total[a:b].sum() for a, b in whole))
    wait = float(np.median(waits))
    if share <= limits.epoch_share or wait < limits.epoch_wait or waits.min() <= 10 * longest:
        return
    steps = table.steps[[a for a, _ in whole]]
    yield Finding(
        severity=Severity.WARNING,
        title=f"Waiting for the first batch takes {percent(share)} of an epoch",
        detail=(
            f"In each of {len(whole)} epochs the loop waited for the first batch, {duration(wait)} in the "
            f"median, and for half of the others at most {duration(longest)}. Workers that start anew read "
            f"again what the data set keeps, such as an index. Expected gain: at most {percent(share)} of an "
            "epoch."
        ),
        subject=Subject(phase=Phase.DATA, step=int(steps[0])),
        evidence=(scalar_evidence(f"{PREFIX}{Phase.DATA}", steps, waits),),
        fix=(
            "Set `persistent_workers=True`, or make the data set cheaper to start: read what all epochs "
            "share before the loader is built."
        ),
        refuted_if="the epochs are as long with workers that persist.",
    )


def _iterators(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find steps each of which waits for the first batch of an iterator of its own, with workers."""
    table, batch, info = read_phases(run), run.scalar("batch"), read_runtime_info(run)
    workers = 0 if info is None else int(info.payload.get("workers") or 0)
    if table is None or not workers or len(batch.steps) < limits.steady_steps or batch.values.any():
        return
    waits = table.phase(Phase.DATA)
    share, wait = float(np.median(waits / table.total)), float(np.median(waits))
    if share <= limits.epoch_share or wait < limits.epoch_wait:
        return
    yield Finding(
        severity=Severity.WARNING,
        title="Every step creates an iterator of its loader, with workers",
        detail=(
            f"All {len(batch.steps)} recorded steps took the first batch of an iterator. Each creates one, "
            f"which starts {count(workers, 'worker process', 'worker processes')} unless they persist, and "
            f"drops what they have prepared. The wait for the batch is {duration(wait)} in the median. "
            f"Expected gain: at most {percent(share)} of a step."
        ),
        subject=Subject(phase=Phase.DATA, step=int(batch.steps[0])),
        evidence=(phase_evidence(table, Phase.DATA),),
        fix=(
            "Loop over the loader, or create `iter(loader)` once and call `next` on it, in place of "
            "`next(iter(loader))`. With one batch per epoch, set `persistent_workers=True`."
        ),
        refuted_if="the steps are as long with one iterator for all of them.",
    )


def _control(run: Run, share: float) -> tuple[Evidence, float] | None:
    """Return the evidence of a control with a cached batch, and the share of a step that it saved.

    None where there is no control, or where both nothing and ``share`` are possible savings.
    """
    profile = read_profile(run)
    rows = profile.rows("controls") if profile is not None else []
    row = next((r for r in rows if r.get("name") == CONTROL and r.get("ratio") is not None), None)
    if profile is None or row is None:
        return None
    ratio, high = float(row["ratio"]), row.get("high")
    if high is not None and float(high) >= 1.0 and float(row.get("low") or 0.0) <= 1.0 - share:
        return None
    # Within its interval it saved nothing.
    saved = max(0.0, 1.0 - ratio) if high is None or float(high) < 1.0 else 0.0
    return profile.evidence(f"controls/{CONTROL}", ratio, "of a step"), saved


def _traced(run: Run, limits: BottleneckLimits) -> StoredProfile | None:
    """Return the profile of a run with as many traced steps as a claim needs; None where there is none."""
    profile = read_profile(run)
    steps = int(profile.content.get("traced_steps") or 0) if profile is not None else 0
    return profile if steps >= limits.traced_steps else None


def _low(shares: object) -> float:
    """Return the lower end of the interval of the median of shares by step, 0 where there are none."""
    return lower_median([float(share) for share in shares]) if isinstance(shares, list) else 0.0


def _launches(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find idle time of a device that the launching host causes."""
    profile = _traced(run, limits)
    device = profile.content.get("device") if profile is not None else None
    if profile is None or not device:
        return
    idle = float(device.get("idle") or 0.0)
    causes: dict[str, float] = device.get("causes") or {}
    host = host_share(causes)
    limited = limit_of(idle, causes, limits=StepLimits(idle=limits.launch_idle, host=limits.launch_host))
    low = _low(device.get("idle_by_step"))
    if low <= limits.launch_idle or limited is not Limit.LAUNCHES:
        return
    main = max(HOST_CAUSES, key=lambda name: causes.get(name, 0.0))
    attempt = (
        "The model is compiled already: try mode='reduce-overhead' (CUDA graphs), "
        if profile.state("compiled regions") == "on"
        else "Try torch.compile, with mode='reduce-overhead' for CUDA graphs, "
    )
    yield Finding(
        severity=severity_of(run, limits, idle * host, low * host),
        title=f"The GPU is idle for {percent(idle)} of the step, mostly launch-bound",
        detail=(
            f"The GPU is idle for {percent(idle)} of the step; {percent(host)} of the idle time is "
            f"launch-bound (mostly {main.replace('_', ' ')}). Expected gain: at most {percent(idle * host)} "
            "of a step."
        ),
        subject=Subject(),
        evidence=(
            profile.evidence("device/idle", idle, "of a step"),
            profile.evidence(f"device/causes/{main}", causes.get(main, 0.0), "of the idle time"),
        ),
        fix=(
            f"{attempt}or a larger batch; remove calls that wait for the device (`.item()`, printing a "
            "tensor)."
        ),
        refuted_if="doubling the batch doubles the step time: the device is then the limit.",
    )


def _communication(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find communication that no computation overlaps."""
    profile = _traced(run, limits)
    exposed = profile.content.get("exposed_communication") if profile is not None else None
    if profile is None or exposed is None or float(exposed) <= limits.exposed_share:
        return
    if _low(profile.content.get("exposed_by_step")) <= limits.exposed_share:
        return
    share = float(exposed)
    yield Finding(
        severity=Severity.INFO,
        title=f"Communication is exposed for {percent(share)} of a step",
        detail=(
            f"For {percent(share)} of a step the device communicates without computing. Expected gain: at "
            f"most {percent(share)} of a step."
        ),
        subject=Subject(),
        evidence=(profile.evidence("exposed_communication", share, "of a step"),),
        fix=(
            "Start reductions during backward (DDP buckets, FSDP prefetch), reduce every few steps with "
            "accumulation under `no_sync()`, or send fewer bits. First check for a late rank: its peers then "
            "wait, which is not communication (`backlight trace` on all ranks)."
        ),
        refuted_if="the collectives wait for a late rank and take their usual time once it arrives.",
    )


def _copies(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find the lines whose copies take more of a step than they should."""
    profile = _traced(run, limits)
    if profile is None:
        return
    by_line: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in profile.rows("copies"):
        by_line[str(row.get("line") or "")].append(row)
    shares = {line: sum(float(row["share"]) for row in rows) for line, rows in by_line.items()}
    for line, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share <= limits.copy_share:
            return
        rows = by_line[line]
        worst = max(rows, key=lambda row: float(row["share"]))
        spent = sum(float(row["device_ms"] or row["host_ms"]) for row in rows)
        calls = sum(float(row["calls"]) for row in rows)
        source, target = worst["source"] or "unknown", worst["target"] or "unknown"
        what = "Casts" if source != target else "Copies"
        layout = " that change the layout" if source == target and worst["contiguous"] is False else ""
        where = line or "unknown line"
        yield Finding(
            severity=Severity.INFO,
            title=f"{what} at {where.rpartition('/')[2]} take {percent(share)} of a step",
            detail=(
                f"{what}{layout} from {source} to {target} take {percent(share)} of a step "
                f"({duration(spent / 1e3)}, {count(round(calls), 'call')}) at "
                f"{line or 'a line that is not in the trace'}. Expected gain: at most {percent(share)} of a "
                "step."
            ),
            subject=Subject(line=line or None),
            evidence=(
                profile.evidence(f"copies/{where}", share, "of a step"),
                profile.evidence(f"copies/{where}/milliseconds", spent, "ms"),
            ),
            fix=(
                "Cast once outside the loop, keep one dtype through the block (autocast, or weights in that "
                "dtype), drop unneeded `.contiguous()` and `.clone()` calls, and copy from pinned memory."
            ),
            refuted_if="the same step without that line, checked for equal results, is not faster.",
        )


def _optimizer(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find optimizers that loop over parameters where one call would do, each by its own time.

    Where several were not timed apart, as in older runs, it is not known whose the time of the phase is.
    """
    table, info = steady_phases(run, limits), read_runtime_info(run)
    if table is None or info is None or is_busy(run, limits):
        return
    groups = info.payload.get("optimizers") or ()
    on_device = (info.payload.get("memory") or {}).get("where") == "device"
    for number in sorted({int(group.get("optimizer") or 0) for group in groups}):
        of_number = [group for group in groups if int(group.get("optimizer") or 0) == number]
        slow = [g for g in of_number if not g["fused"] and g["foreach"] is False and g["tensors"] > 1]
        if not slow or len({group["type"] for group in of_number}) > 1:
            continue
        group = max(slow, key=lambda entry: int(entry["tensors"]))
        # On a CPU, foreach is slower than the loop.
        if group["type"] not in FUSED and not on_device:
            continue
        is_alone = len(of_number) == len(groups)
        seconds = table.phase(Phase.OPTIMIZER) if is_alone else optimizer_seconds(run, table, number)
        if seconds is not None:
            series = f"{PREFIX}{Phase.OPTIMIZER}" if is_alone else f"{OPTIMIZER_PREFIX}{number}"
            who = str(group["type"]) if is_alone else optimizer_name(run, number)
            yield from _slow_optimizer(limits, table, info, group, seconds, who, series)


def _slow_optimizer(
    limits: BottleneckLimits,
    table: PhaseTimes,
    info: Event,
    group: Mapping[str, Any],
    seconds: Floats,
    who: str,
    series: str,
) -> Iterator[Finding]:
    """Find an optimizer whose ``seconds``, those of ``series``, are worth a fused one."""
    share = float(np.median(seconds / table.total))
    if share <= limits.optimizer_share or np.median(seconds) < limits.optimizer_floor:
        return
    kind, tensors = str(group["type"]), int(group["tensors"])
    option = "fused=True" if kind in FUSED else "foreach=True"
    yield Finding(
        severity=Severity.INFO,
        title=f"{who} takes {percent(share)} of a step and is not fused",
        detail=(
            f"{who} takes {percent(share)} of a steady step, and updates its "
            f"{count(tensors, 'tensor')} one by one: neither fused nor foreach is in use. Expected gain: "
            f"most of {percent(share)} of a step."
        ),
        subject=Subject(phase=Phase.OPTIMIZER),
        evidence=(
            scalar_evidence(series, table.steps, seconds),
            info_evidence(info, f"{kind}: fused off, foreach off"),
        ),
        fix=f"Use `{kind}(..., {option})` and compare: `backlight compare --ab` on both commands.",
        refuted_if=f"the same run with `{option}` spends as long in the optimizer.",
    )


def _anomaly(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find anomaly detection, which keeps a stack of Python for every node of the graph, left on."""
    info = read_runtime_info(run)
    steps = 0 if info is None else int(info.payload.get("anomaly_steps") or 0)
    if info is not None and steps >= limits.steady_steps:
        yield Finding(
            severity=Severity.WARNING,
            title="Anomaly detection is on: every step takes longer for it",
            detail=(
                "`torch.autograd.set_detect_anomaly`, or `detect_anomaly`, was on in backward of "
                f"{count(steps, 'recorded step')}. torch then keeps the stack of Python for every operation, "
                "and looks for NaN in every gradient of the backward pass. Expected gain: often over half "
                "of a step; unknown until tried."
            ),
            subject=Subject(rank=info.rank),
            evidence=(info_evidence(info, f"anomaly detection on at {steps} recorded steps"),),
            fix="Remove it; `backlight nan SCRIPT` finds the operation that gives the first NaN without it.",
            refuted_if="a NaN is being looked for in this run.",
        )


def _threads(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find ranks whose threads, with the workers of their loaders, outnumber the cores."""
    info = read_runtime_info(run)
    if info is None:
        return
    facts = info.payload
    cores, threads = int(facts.get("cores") or 0), int(facts.get("threads") or 0)
    ranks, workers = int(facts.get("local_ranks") or 1), int(facts.get("workers") or 0)
    wanted = ranks * (threads + workers)
    waited = facts.get("core_wait")
    if not cores or threads < 2 or wanted <= limits.threads_per_core * cores:
        return
    if waited is not None and float(waited) < limits.waited_share:
        return
    # With a device the threads of torch are idle: only a measured wait shows that they compete.
    if waited is None and (facts.get("memory") or {}).get("where") == "device":
        return
    better = max(1, cores // ranks - workers)
    yield Finding(
        severity=Severity.INFO,
        title=f"{count(wanted, 'thread')} share {count(cores, 'core')}",
        detail=(
            f"{count(wanted, 'thread')} share {count(cores, 'core')}: {count(ranks, 'rank')} on this "
            f"machine, each with {count(threads, 'thread')} of torch and {count(workers, 'loader worker')}. "
            "Waiting threads spin and take cores from working ones. Expected gain: unknown until tried, "
            "often several-fold on a CPU."
        ),
        subject=Subject(rank=info.rank),
        evidence=(
            info_evidence(info, f"threads {threads}, workers {workers}"),
            info_evidence(info, f"cores {cores}, local ranks {ranks}"),
        ),
        fix=f"Set `OMP_NUM_THREADS={better}` (or `torch.set_num_threads({better})`) and compare both runs.",
        refuted_if=f"the same run with {count(better, 'thread')} is not faster.",
    )


def _late_rank(run: Run, limits: BottleneckLimits) -> Iterator[Finding]:
    """Find a rank whose own phases last longer, while it waits less than the others in the shared ones.

    Ranks that step together take equally long for a step; the phases show which of them is late.
    """
    ranks = run.attempts[-1].ranks if run.attempts and not is_busy(run, limits) else ()
    tables = {rank: table for rank in ranks if (table := steady_phases(run, limits, rank)) is not None}
    if len(tables) < 2:
        return
    work = {rank: float(np.median(_unshared(table))) for rank, table in tables.items()}
    shared = {rank: float(np.median(table.total - _unshared(table))) for rank, table in tables.items()}
    step = float(np.median([np.median(table.total) for table in tables.values()]))
    late = max(sorted(work), key=lambda rank: work[rank])
    others = [rank for rank in tables if rank != late]
    excess = (work[late] - float(np.median([work[rank] for rank in others]))) / step
    waited = (float(np.median([shared[rank] for rank in others])) - shared[late]) / step
    # Both must hold: it works longer, and in the shared phases the others wait for it.
    if excess <= limits.straggler_share or waited < excess / 2:
        return
    table, reference = tables[late], tables[others[0]]
    name = max(
        (n for n in table.names if n not in SHARED),
        key=lambda n: float(np.median(table.phase(n)) - np.median(reference.phase(n))),
    )
    phase = name.replace("_", " ")
    yield Finding(
        severity=Severity.INFO,
        title=f"Rank {late} is a straggler: {percent(excess)} of a step slower, in {phase}",
        detail=(
            f"Rank {late} works {percent(excess)} of a step longer than the other ranks, mostly in {phase}, "
            f"and they wait for it. Expected gain: at most {percent(excess)} of a step."
        ),
        subject=Subject(rank=late, phase=name),
        evidence=tuple(
            Evidence(
                f"scalars/{PREFIX}{name}", None, float(np.median(t.phase(name))), f"s, median of rank {rank}"
            )
            for rank, t in ((late, table), (others[0], reference))
        ),
        fix=(
            "Check that rank: its share of the data, its machine (clock, temperature, other jobs), its "
            "loader. `backlight trace` on all ranks shows which collectives wait."
        ),
        refuted_if="another rank is late after ranks swap machines, or with equal batches.",
    )


def _unshared(table: PhaseTimes) -> Floats:
    kept = [column for column, name in enumerate(table.names) if name not in SHARED]
    return np.asarray(table.seconds[:, kept].sum(axis=1))
