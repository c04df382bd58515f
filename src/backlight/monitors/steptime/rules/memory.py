"""Rule ``memory``: graphs that are kept, memory lost to fragmentation or whole logits, recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import (
    GROWING_HOOKS,
    HOST_MEMORY,
    KEPT_DATA,
    KEPT_GRAPHS,
    info_evidence,
    newest_events,
    peak_memory,
    percent,
    read_profile,
    read_runtime_info,
)
from backlight.monitors.steptime.model.machine import memory_growth
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, duration, size


@dataclass(frozen=True)
class MemoryLimits(Limits, monitor="steptime"):
    """Limits of the rule ``memory``."""

    fragmentation_share: float = limit(
        0.25, "share of the reserved memory that no tensor used at the peak", high=1.0
    )
    fragmentation_bytes: float = limit(2.0**28, "bytes below which that share is irrelevant (256 MiB)")
    logits_share: float = limit(0.2, "share of the peak memory that logits and their copies take", high=1.0)
    logits_bytes: float = limit(2.0**26, "bytes below which rewriting a loss is not worth it (64 MiB)")
    kept_steps: int = limit(
        32, "steps whose graphs are all alive: unrolled loops and alternating losses keep fewer", low=4
    )
    held_steps: int = limit(8, "the same of graphs in a container that no statement empties", low=4)
    growth_bytes: float = limit(2.0**10, "bytes a step below which growth is not stated (1 KiB)")
    kept_share: float = limit(
        0.05, "share of the memory above which a list of tensors without a graph is a warning", high=1.0
    )
    recompute_share: float = limit(0.05, "share of a step spent on recomputed forwards", high=1.0)
    recompute_memory: float = limit(
        0.6, "share of the memory below which the peak leaves space for what checkpointing saves", high=1.0
    )


@rule("memory", monitor="steptime", limits=MemoryLimits, is_statistic=True)
def memory(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find memory that grows or could be free, and recomputation although memory is free."""
    for find in (_kept_graphs, _kept_data, _hooks, _growth, _fragmentation, _logits, _recomputation):
        yield from find(run, limits)


def _kept_graphs(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find graphs of earlier steps that are still alive, which is observed and not estimated."""
    events = newest_events(run, KEPT_GRAPHS)
    longest = max(events, key=lambda e: (e.payload["until"] - e.payload["since"], e.step or 0), default=None)
    if longest is None:
        return
    at_least = limits.held_steps if longest.payload.get("only_grows") else limits.kept_steps
    if longest.payload["until"] - longest.payload["since"] < at_least:
        return
    facts, holder = longest.payload, longest.payload.get("holder") or {}
    steps = int(facts["until"]) - int(facts["since"]) + 1
    what = {"loss": "losses", "output": "outputs", "evaluation": "evaluation outputs"}[facts["of"]]
    name, line = holder.get("name"), holder.get("line")
    holds = f"`{name}` holds them" if name else "What holds them was not found"
    where = f", line {line}: `{holder['source']}`" if line else ""
    grown = float(facts.get("bytes_per_step") or 0.0)
    is_measured = grown >= limits.growth_bytes
    gain = f"about {size(grown)} of memory a step" if is_measured else "memory that does not grow"
    fix = "evaluation" if facts["of"] == "evaluation" else "container" if holder.get("count") else "variable"
    yield Finding(
        severity=Severity.WARNING,
        title=f"{f'`{name}`' if name else 'The script'} keeps the graphs of {count(steps, 'step')}",
        detail=(
            f"At step {longest.step} the autograd graphs of the {what} of steps {facts['since']} to "
            f"{facts['until']} were all still alive ({facts['marked']} observed). {holds}{where}. "
            f"Expected gain: {gain}."
        ),
        subject=Subject(rank=longest.rank, step=int(facts["since"]), line=line),
        evidence=(
            Evidence(f"events/{KEPT_GRAPHS}", longest.step, float(steps), "steps"),
            Evidence(f"events/{KEPT_GRAPHS}", longest.step, grown, "bytes"),
        ),
        fix=_FIXES[fix],
        refuted_if="the graphs are meant to be kept for a later backward, and are released by it.",
    )


_FIXES = {
    "evaluation": "Evaluate under `torch.no_grad()`, or append `output.detach()`.",
    "container": "Append `loss.item()`, or `.detach()` where a tensor is needed: a tensor holds its graph.",
    "data": "Keep numbers, as `loss.item()`, or empty it once its values were used.",
    "variable": "Detach it between steps, as `hidden = hidden.detach()`, or add `loss.item()`.",
}


def _kept_data(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find a container that had more tensors without a graph at each reading of the script's names."""
    last = {event.rank: event for event in newest_events(run, KEPT_DATA)}.values()
    most = max(last, key=lambda event: float(event.payload["bytes_per_step"]), default=None)
    if most is None or most.payload["bytes_per_step"] < limits.growth_bytes:
        return
    facts, holder = most.payload, most.payload["holder"]
    grown, stored = float(facts["bytes_per_step"]), float(facts["bytes"])
    is_much = stored > limits.kept_share * float(facts["capacity"]) and not facts["is_mapping"]
    name, line = holder["name"], holder["line"]
    where = f" Line {line}: `{holder['source']}`." if line else ""
    what = count(holder["count"], "item") if holder["count"] else "one tensor"
    yield Finding(
        severity=Severity.WARNING if is_much else Severity.INFO,
        title=f"`{name}` grows by {size(grown)} a step",
        detail=(
            f"At step {most.step} `{name}` held {what} with {size(stored)} of tensors on {facts['device']}, "
            f"and at each reading since step {facts['since']} more than before; no statement was found that "
            f"empties it.{where} Expected gain: {size(grown)} of memory a step."
        ),
        subject=Subject(rank=most.rank, step=int(facts["since"]), line=line),
        evidence=(
            Evidence(f"events/{KEPT_DATA}", most.step, stored, "bytes"),
            Evidence(f"events/{KEPT_DATA}", most.step, grown, "bytes"),
        ),
        fix=_FIXES["data"],
        refuted_if=f"`{name}` is meant to keep them and its length is limited, as that of a cache or buffer.",
    )


def _hooks(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find hooks that a loop registers again and again, which is observed and not estimated."""
    event = next(iter(newest_events(run, GROWING_HOOKS)[-1:]), None)
    if event is None or not event.payload["names"]:
        return
    facts, line = event.payload, event.payload["line"]
    others = f", and so do {count(int(facts['names']) - 1, 'other')}" if facts["names"] > 1 else ""
    where = f" The newest is defined at `{line}`." if line else ""
    yield Finding(
        severity=Severity.WARNING,
        title=f"`{facts['name']}` gets another {facts['kind']} in each step",
        detail=(
            f"At step {event.step} it had {facts['hooks']}, one or more for each step since step "
            f"{facts['since']}{others}. All of them run whenever it is called: each step takes longer, and "
            f"keeps more, than the one before.{where}"
        ),
        subject=Subject(rank=event.rank, step=int(facts["since"]), line=line),
        evidence=(Evidence(f"events/{GROWING_HOOKS}", event.step, float(facts["hooks"]), "hooks"),),
        fix="Register it once, before the loop, or call `remove()` on the handle that registering returns.",
        refuted_if="the hooks are removed later, before they cost anything.",
    )


def _growth(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find memory of the process that grows, where no graph and no container was found that keeps it."""
    growth = memory_growth(run)
    causes = (KEPT_GRAPHS, KEPT_DATA, GROWING_HOOKS)
    if growth is None or any(newest_events(run, kind) for kind in causes):
        return
    grown = size(growth.per_step)
    yield Finding(
        severity=Severity.INFO,
        title=f"The memory of the process grows by {grown} a step",
        detail=(
            f"From step {growth.since} to step {growth.until} it grew to {size(growth.level)}. No graph of "
            "an earlier step and no container of tensors was found that keeps it. Expected gain: "
            f"{grown} a step."
        ),
        subject=Subject(step=growth.since),
        evidence=(Evidence(f"scalars/{HOST_MEMORY}", growth.until, growth.level, "bytes"),),
        fix=(
            "Look for what a step adds to and never empties: lists of arrays or texts, a cache of the data "
            "set, results of a logger."
        ),
        refuted_if="it stops growing once a cache, such as that of the data set, is full.",
    )


def _fragmentation(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find an allocator that reserves far more than was ever in use, or that had to empty its cache."""
    info = read_runtime_info(run)
    memory = (info.payload.get("memory") or {}) if info is not None else {}
    if info is None or not memory.get("reserved"):
        return
    reserved, used = float(memory["reserved"]), float(memory.get("peak") or 0.0)
    retries = int(memory.get("retries") or 0)
    lost = reserved - used
    is_fragmented = lost >= limits.fragmentation_bytes and lost / reserved > limits.fragmentation_share
    if not is_fragmented and not retries:
        return
    retried = (
        f" It emptied its cache and retried {count(retries, 'time')}, which waits for the device."
        if retries
        else ""
    )
    yield Finding(
        severity=Severity.WARNING if retries else Severity.INFO,
        title=f"{size(lost)} of GPU memory is lost to fragmentation",
        detail=(
            f"At its peak the allocator had reserved {size(reserved)} and {size(used)} were in use: "
            f"{size(lost)} ({percent(lost / reserved)}) were free between blocks.{retried} Expected gain: up "
            f"to {size(lost)} of memory."
        ),
        subject=Subject(rank=info.rank),
        evidence=(info_evidence(info, reserved, "bytes reserved"), info_evidence(info, used, "bytes in use")),
        fix=(
            "Set `PYTORCH_ALLOC_CONF=expandable_segments:True`, or pad batches to a few lengths: changing "
            "shapes leave holes."
        ),
        refuted_if="reserved memory stays the same with expandable segments.",
    )


def _logits(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find logits that take memory: elements times (bytes of their type + 4 of the fp32 copy).

    The peak is that of the device, or of the process where there is none.
    """
    profile = read_profile(run)
    logits = profile.content.get("logits") if profile is not None else None
    if profile is None or not logits or profile.state("chunked loss") == "on":
        return
    shape = [int(length) for length in logits["shape"]]
    taken = math.prod(shape) * (int(logits["itemsize"]) + 4)
    peak, _ = peak_memory(run, profile)
    if taken < limits.logits_bytes or peak <= 0 or taken / peak <= limits.logits_share:
        return
    share = min(1.0, taken / peak)
    yield Finding(
        severity=Severity.INFO,
        title=f"Logits take {percent(share)} of the peak memory",
        detail=(
            f"Logits of shape {' x '.join(map(str, shape))} in {logits['dtype']} and their fp32 copy take "
            f"{size(taken)}, {percent(share)} of the peak of {size(peak)}. Expected gain: up to "
            f"{size(taken)} of memory with a chunked loss."
        ),
        subject=Subject(),
        evidence=(profile.evidence("logits", taken, "bytes"), profile.evidence("memory/peak", peak, "bytes")),
        fix=(
            "Compute the loss over chunks of tokens, or with a fused linear cross entropy, so that the "
            "logits of all tokens never exist at once; `backlight memory` shows the live tensors before and "
            "after."
        ),
        refuted_if="the memory peak is elsewhere in the step and does not fall with a chunked loss.",
    )


def _recomputation(run: Run, limits: MemoryLimits) -> Iterator[Finding]:
    """Find checkpointing that costs a share of the step while much of the memory is free."""
    profile = read_profile(run)
    step = profile.step_ms if profile is not None else None
    if profile is None or not step:
        return
    recomputed = {
        str(m["name"]): float(m["recomputed_ms"]) for m in profile.rows("modules") if m["recomputed_ms"]
    }
    # Of nested modules only the outermost counts.
    outer = {
        name: spent
        for name, spent in recomputed.items()
        if not name or ("" not in recomputed and not any(name.startswith(f"{o}.") for o in recomputed))
    }
    spent = sum(outer.values())
    peak, capacity = peak_memory(run, profile)
    if spent / step <= limits.recompute_share or peak <= 0 or capacity <= 0:
        return
    if peak / capacity >= limits.recompute_memory:
        return
    worst = max(outer, key=lambda name: outer[name])
    share = percent(spent / step)
    yield Finding(
        severity=Severity.INFO,
        title=f"Checkpointing takes {share} of a step although memory is free",
        detail=(
            f"Recomputed forwards take {duration(spent / 1e3)}, {share} of a step, in "
            f"{count(len(outer), 'module')} (most in `{worst}`), while the peak memory is {size(peak)} of "
            f"{size(capacity)} ({percent(peak / capacity)}). Expected gain: at most {share} of a step."
        ),
        subject=Subject(module=worst or None, phase=Phase.BACKWARD),
        evidence=(
            profile.evidence(f"modules/{worst}/recomputed_ms", outer[worst], "ms"),
            profile.evidence("memory/peak", peak, "bytes"),
            profile.evidence("memory/capacity", capacity, "bytes"),
        ),
        fix="Checkpoint fewer blocks, or none; `backlight memory predict RECIPE` predicts the peak.",
        refuted_if="the run without checkpointing does not fit, or takes as long.",
    )
