"""The summary of a run: its headline, how its process ended, what was not measured, and the cost of watching.

The text is the same on the page, in Markdown and in the terminal. Without findings it states what was
measured; it never states that a run is healthy.
"""

from __future__ import annotations

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.findings.evaluate import Withdrawn, withdrawn
from backlight.findings.losses import losses_of
from backlight.records import OTHERS, Finding, RunStatus, Severity
from backlight.report.panel import FactLine, MonitorSummary, in_order
from backlight.report.source import APART, Source
from backlight.store.format.schema import COST, DISK_LIMIT, ENDED, EXCEPTION, REPEATED_WRITES, STOPPED
from backlight.store.read.run import Event, Run
from backlight.text import count, duration, listed, number, percent, visible, with_unit

STATUS = {
    RunStatus.RUNNING: "still running when this was written",
    RunStatus.FINISHED: "",
    RunStatus.FAILED: "ended with an error",
    RunStatus.KILLED: "the process ended without closing the run",
    RunStatus.UNKNOWN: "it is not known how the process ended",
}
"""What is added to a status."""


MESSAGE = 200
"""Characters of the message of an exception that are shown."""


PARTED = " \N{MIDDLE DOT} "
"""Between the parts of the line about the status."""


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Something that was not measured, why, and the parameters that it concerns."""

    what: str
    reason: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The verdict in words; ``tone`` is ``error``, ``warning``, ``info``, ``clear`` or ``unmeasured``.

    ``headline`` is the title of the worst finding, or the result of a run without one; a run that failed is
    as bad as an error. ``state`` is the word of its status. ``tally`` is how the run ended, if not well, and
    counts the findings; ``hints`` counts the hints. ``lacks`` is what the run lacks of a recording to its
    end, empty where it lacks nothing: else the tone is never ``clear``. ``about`` is the model, the command
    and the host, each where it is known. ``lines`` are the panels' lines
    of facts. ``withdrawn`` was reported while the run went on, and is not among
    the findings. ``checked`` is what the rules looked at, where they found nothing.
    """

    tone: str
    headline: str
    tally: str
    hints: int
    lacks: str
    detail: str
    state: str
    status: str
    about: tuple[str, ...]
    lines: tuple[FactLine, ...]
    losses: tuple[str, ...]
    withdrawn: tuple[Withdrawn, ...]
    unmeasured: tuple[Unmeasured, ...]
    checked: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What stands under the headline: the tally, unless the headline is the same, and the detail."""
        rest = self.tally.removeprefix(self.headline).removeprefix(". ")
        return f"{rest}. {self.detail}" if rest else self.detail


def tally(findings: Sequence[Finding]) -> str:
    """Return ``2 errors, 1 warning, 1 accepted``."""
    amounts = Counter(finding.severity for finding in findings if not finding.accepted)
    words = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
    counted = [count(amounts[severity], word) for severity, word in words.items() if amounts[severity]]
    accepted = sum(bool(finding.accepted) for finding in findings)
    return ", ".join([*counted, *([f"{accepted:,} accepted"] if accepted else [])])


def summary_of(source: Source) -> MonitorSummary:
    """Return the first summary, in the order of the page, of a monitor that measured something."""
    # Health gives the reason where nothing was measured.
    watched = {*source.run.monitors, "health"} if source.run.monitors else ()
    summaries = [
        summary for p in in_order(watched) if p.summary is not None and (summary := p.summary(source))
    ]
    return next((summary for summary in summaries if summary.measured), summaries[0])


def outcome(source: Source) -> RunOutcome:
    """Return the summary of a run: its findings, and what was measured."""
    findings, summary = source.findings, summary_of(source)
    detail = summary.detail
    lacks = lacking(source.run)
    if findings:
        tone, headline, counted = findings[0].severity.value, visible(findings[0].title), tally(findings)
        detail = f"{lacks}. {detail}" if lacks else detail
    elif summary.measured and lacks:
        tone, counted = "unmeasured", lacks
        headline = summary.headline or counted
        detail = f"Nothing was found in what was recorded. {detail}"
    elif summary.measured:
        tone, counted = "clear", "No findings"
        headline = summary.headline or counted
        detail += " Only recorded data was checked."
    else:
        tone, headline, counted = "unmeasured", *["Nothing was measured"] * 2
        detail += " Nothing can be said about the gradients of this run."
    ended = ending(source.run)
    if ended:
        headline = headline if tone == "error" else ended
        tone, counted = "error", f"{ended}. {counted}"
    if command := explaining_command(source.run):
        detail += f" `{command}` explains it."
    word = "interrupted" if is_interrupted(source.run) else source.run.status.value
    further = (
        word, status_line(source), about(source), _lines(source), _losses(source),
        tuple(withdrawn(source.run, (*source.findings, *source.hints))), _unmeasured(source),
    )  # fmt: skip
    checked = _checked(source) if tone == "clear" else ()
    return RunOutcome(tone, headline, counted, len(source.hints), lacks, detail, *further, checked)


def _lines(source: Source) -> tuple[FactLine, ...]:
    """Return the lines of facts of the monitors that watched."""
    watched = source.run.monitors
    makers = [p.line for p in in_order(watched) if p.line is not None and p.monitor in watched]
    return tuple(line for make in makers if (line := make(source)) is not None)


def _checked(source: Source) -> tuple[str, ...]:
    """Return what the rules of the monitors that watched looked at."""
    watched = source.run.monitors
    makers = [p.checked for p in in_order(watched) if p.checked is not None and p.monitor in watched]
    return tuple(make(source) for make in makers)


def hints_line(source: Source) -> str:
    """Return how many hints there are, the title of one alone, and the command that prints them."""
    if not source.hints:
        return ""
    run = visible(shlex.quote(source.run.location))
    title = f"{visible(source.hints[0].title)}; " if len(source.hints) == 1 else ""
    return f"{count(len(source.hints), 'hint')}: {title}backlight findings {run} --hints"


def coverage_text(run: Run) -> str:
    """Return ``gradients at 66 of 120 steps, loss at every step``; the loss has the name of what it sums."""
    coverage, losses = run.coverage(), [*losses_of(run)]
    label = "losses" if len(losses) > 1 else losses[0] if losses else ""
    whole = count(coverage.taken, "step")
    if coverage.with_gradients == coverage.with_loss == coverage.taken:
        return f"gradients and {label} at all {whole}"
    at = "all" if coverage.with_gradients == coverage.taken else f"{coverage.with_gradients:,} of"
    if not coverage.with_gradients:
        loss = "all" if coverage.with_loss == coverage.taken else f"{coverage.with_loss:,} of"
        return f"{label} at {loss} {whole}" if label else ""
    loss = "every step" if coverage.with_loss == coverage.taken else f"{coverage.with_loss:,}"
    return f"gradients at {at} {whole}" + (f", {label} at {loss}" if label else "")


def sampled_text(run: Run) -> str:
    """Return :func:`coverage_text`; empty where gradients and one loss, a mean, are there of all steps."""
    coverage = run.coverage()
    is_whole = coverage.with_gradients == coverage.with_loss == coverage.taken and [*losses_of(run)] == [
        "loss"
    ]
    return "" if is_whole else coverage_text(run)


def lacking(run: Run) -> str:
    """Return ``Incomplete: recording stopped at step 256 of 2,500``; empty where a run lacks nothing."""
    lacks = run.shortfall
    return f"Incomplete: {lacks}" if lacks else ""


def ending(run: Run) -> str:
    """Return how a run ended, as ``Failed with ValueError at step 12``; empty where it runs or finished."""
    if run.status is RunStatus.KILLED:
        kill = first_event(run, ENDED)
        how = "killed" if kill is None else visible(kill.payload.get("how", "killed"))
        return f"{how[:1].upper()}{how[1:]}"
    if run.status is not RunStatus.FAILED:
        return ""
    stop = first_event(run, STOPPED)
    event = stop or first_event(run, EXCEPTION)
    if event is None:
        return "Failed"
    rank = f" on rank {event.rank}" if run.attempts[-1].world_size > 1 else ""
    step = "" if event.step is None else f" at step {number(event.step)}"
    line = f" ({visible(event.payload['line'])})" if event.payload.get("line") else ""
    if stop is not None:
        return f"Stopped on {visible(stop.payload.get('rule'))}{step}"
    if is_interrupted(run):
        return f"Interrupted{step}{rank}"
    during = " in backward" if event.payload.get("in_backward") else ""
    return f"Failed with {visible(event.payload.get('type', 'an exception'))}{during}{step}{rank}{line}"


def is_interrupted(run: Run) -> bool:
    """Return whether the user's interrupt ended a run, however its script then left."""
    event = first_event(run, EXCEPTION) if run.status is RunStatus.FAILED else None
    stopped = first_event(run, STOPPED) is not None
    return event is not None and not stopped and event.payload.get("type") == "KeyboardInterrupt"


def explaining_command(run: Run) -> str:
    """Return the command that explains the exception that ended a run, empty where none does."""
    event = first_event(run, EXCEPTION) if run.status is RunStatus.FAILED else None
    name = "" if event is None else visible(event.payload.get("explained_by", ""))
    if not name:
        return ""
    last = run.attempts[-1]
    return f"backlight {name} {visible(shlex.join((last.script or 'SCRIPT', *last.argv)))}"


def probing_command(run: Run, view: RunOutcome) -> str:
    """Return the command that looks further into a run without findings, empty where none does."""
    last = run.attempts[-1] if run.attempts else None
    if view.tone != "clear" or last is None or not last.script:
        return ""
    name = next((line.command for line in view.lines if line.command), "check")
    return f"backlight {name} {visible(shlex.join((last.script, *last.argv)))}"


def first_event(run: Run, kind: str) -> Event | None:
    """Return the first event of a kind in the last attempt, None where there is none."""
    last = run.attempts[-1].index if run.attempts else 0
    events = [event for event in run.events(kind) if event.attempt == last]
    return min(events, key=lambda event: event.time, default=None)


def about(source: Source) -> tuple[str, ...]:
    """Return the model with its size, the command, and the host with its device, each where it is known."""
    stored = source.run.fingerprint()
    if stored is None:
        return ()
    root = [kind for name, kind in stored.modules if not name]
    parts = (
        ", ".join((*root, count(stored.parameter_count, "parameter"))),
        " ".join((stored.script, *stored.arguments)),
        ", ".join(part for part in (stored.host, stored.device) if part),
    )
    return tuple(visible(part) for part in parts if part)


def status_line(source: Source) -> str:
    """Return what belongs behind the word of the status: how the process ended, attempts, ranks, times."""
    attempts = source.run.attempts
    if not attempts:
        return STATUS[RunStatus.UNKNOWN]
    last = attempts[-1]
    stop, event = (first_event(source.run, kind) for kind in (STOPPED, EXCEPTION))
    how = STATUS[last.status]
    if stop is not None:
        how = f"stopped on {visible(stop.payload.get('rule'))}"
    elif event is not None and last.status is RunStatus.FAILED:
        texts = (str(event.payload.get(key, "")) for key in ("type", "message"))
        how = "" if is_interrupted(source.run) else visible(": ".join(filter(None, texts)))[:MESSAGE]
    parts = [how] if how else []
    if len(attempts) > 1:
        offsets = listed([number(a.step_offset) for a in attempts[1:]])
        parts.append(f"{len(attempts)} attempts (restarted at step {offsets})")
    if last.world_size > 1:
        recorded = len(last.ranks)
        whole = count(last.world_size, "process", "processes")
        parts.append(whole if recorded == last.world_size else f"{recorded} of {whole} left data")
    if attempts[0].started:
        when = datetime.datetime.fromtimestamp(attempts[0].started, datetime.UTC)
        parts.append(f"started {when:%Y-%m-%d %H:%M} UTC")
    if last.ended and last.ended >= last.started:
        parts.append(f"took {duration(last.ended - last.started)}")
    return PARTED.join(parts)


def _losses(source: Source) -> tuple[str, ...]:
    limited = [
        f"Writing was limited by disk space: {visible(event.payload.get('reason', 'the limit was reached'))}"
        for event in source.run.events(DISK_LIMIT)
    ]
    return tuple(visible(loss) for loss in (*source.run.losses, *limited[:1]))


def _unmeasured(source: Source) -> tuple[Unmeasured, ...]:
    listed_here = [
        Unmeasured(count(len(names), "parameter"), visible(reason), tuple(visible(name) for name in names))
        for reason, names in source.unmeasured_parameters.items()
        if len(source.coverage.steps)  # else no gradient was asked for, or nothing was measured at all
    ]
    coverage = source.coverage
    lacking = [
        (r.name, n)
        for r, n, m in zip(source.parameters, coverage.unjoined, coverage.measured, strict=True)
        if n and m
    ]
    if lacking:
        fewest, most = (pick(steps for _, steps in lacking) for pick in (min, max))
        at = f"{most:,}" if fewest == most else f"up to {most:,}"
        what = f"{count(len(lacking), 'parameter')} at {at} of {count(len(coverage.steps), 'step')}"
        listed_here.append(Unmeasured(what, APART, tuple(visible(name) for name, _ in lacking)))
    by_reason: dict[tuple[str, str], Unmeasured] = {}
    for event in source.run.events("unmeasured"):
        if event.payload.get("parameters"):
            continue  # those parameters are listed above, if they never were measured
        what = visible(event.payload.get("what", "something"))
        if what == OTHERS and all(len(a.ranks) == a.world_size > 1 for a in source.run.attempts):
            continue  # said by a part that has been joined since
        reason = visible(event.payload.get("reason", "no reason was noted"))
        by_reason.setdefault((what, reason), Unmeasured(what, reason))
    for event in source.run.events("degradation"):  # a run took a cheaper tier of what it records
        what = visible(event.payload.get("from") or "what was requested")
        reason = visible(event.payload.get("reason", "no reason was noted")).rstrip(".")
        left = f"{reason}; recorded instead: {visible(event.payload.get('to', 'a cheaper tier'))}."
        by_reason.setdefault((what, left), Unmeasured(what, left))
    return (*listed_here, *by_reason.values())


def where(finding: Finding) -> list[tuple[str, str]]:
    """Return the subject of a finding as labelled texts, in the order of their usefulness."""
    subject = finding.subject
    step = None if subject.step is None else number(subject.step)
    rank = None if subject.rank is None else number(subject.rank)
    named = (
        ("parameter", subject.parameter),
        ("module", subject.module),
        ("step", step),
        ("rank", rank),
        ("line", subject.line),
        ("phase", subject.phase),
        ("verdict", subject.verdict),
    )
    return [(label, visible(value)) for label, value in named if value]


def measurements(finding: Finding) -> list[tuple[str, str, str]]:
    """Return the evidence of a finding as (path, step, value); a step that is not known is empty."""
    return [
        (
            visible(evidence.path),
            "" if evidence.step is None else number(evidence.step),
            "" if evidence.value is None else with_unit(evidence.value, evidence.unit),
        )
        for evidence in finding.evidence
    ]


# Host time that a run spent in backlight, at its start, at its end and in its steps; writes it repeated.


def describe_cost(source: Source) -> str:
    """Return the parts that are known, as ``310 ms at the start, 90 ms at the end, …``."""
    parts = [f"{duration(seconds)} at the {part}" for part, seconds in _fixed(source.run).items()]
    spent, clock = source.scalar("cost"), source.scalar("time")
    if len(spent.steps):
        parts.append(f"{duration(float(np.nanmedian(spent.values)))} per recorded step (median)")
        if len(clock.steps) > 1 and (elapsed := float(clock.values[-1] - clock.values[0])) > 0:
            within = (spent.steps > clock.steps[0]) & (spent.steps <= clock.steps[-1])
            share = percent(float(np.nansum(spent.values[within])) / elapsed)
            parts.append(f"{share} of the time between the first step and the last")
    if repeated := source.run.events(REPEATED_WRITES):
        writes = count(sum(int(event.payload.get("writes", 0)) for event in repeated), "write")
        parts.append(
            f"{writes} failed and succeeded later (last: {visible(repeated[-1].payload.get('reason'))})"
        )
    return ", ".join(parts)


def _fixed(run: Run) -> dict[str, float]:
    """Return the seconds of start and end on the lowest rank of the newest attempt that recorded them."""
    events = run.events(COST)
    newest = max((event.attempt for event in events), default=0)
    rank = min((event.rank for event in events if event.attempt == newest), default=0)
    payloads = [event.payload for event in events if (event.attempt, event.rank) == (newest, rank)]
    fixed: dict[str, float] = {}
    for part in ("start", "end"):
        seconds = [payload.get("seconds") for payload in payloads if payload.get("part") == part]
        finite = [float(s) for s in seconds if isinstance(s, int | float) and math.isfinite(s)]
        if finite:
            fixed[part] = sum(finite)
    return fixed
