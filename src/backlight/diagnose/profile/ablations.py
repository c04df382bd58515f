"""Test what a profile suggests: the same script again with one change, beside the same script without.

Runs with and without are interleaved, so that what disturbs the machine disturbs both; the claim is the
interval of their ratio, or is withdrawn.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backlight.diagnose.profile.interventions import (
    CACHED_BATCH,
    FUSED_OPTIMIZER,
    NO_CLIPPING,
    ONE_THREAD,
    WITHOUT_LINE,
    Control,
)
from backlight.diagnose.profile.optimizations import OFF
from backlight.distributed import world
from backlight.monitors.steptime.model.step_times import paired_difference

if TYPE_CHECKING:
    from backlight.diagnose.profile.run import Plan, Profile

VARIABLE = "BACKLIGHT_CONTROL"
"""Environment variable by which a run of ``profile`` is told its control, as JSON."""

CONFIDENCE = 0.95
"""Of the interval of a control; few pairs of runs are affordable."""

DATA, CLIP, OPTIMIZER, COPIES = 0.1, 0.05, 0.1, 0.05
"""Shares of a step from which data, clipping, the optimizer or the copies of a line are suspected."""

SHORT = 0.1
"""Milliseconds of a mean call below which several threads may cost more than they give."""

_LINE = re.compile(r"^(?P<place>.+:\d+) \(")


@dataclass(frozen=True)
class Suspicion:
    """What may cost time: the control that would refute it, and the most that it can save of a step."""

    name: str
    claim: str
    expected: float | None
    line: str = ""


@dataclass(frozen=True)
class Confirmed:
    """The outcome of a control.

    ``ratio`` is the step with the control to the step without, with its interval; all None where it could
    not be run. ``confirmed`` says whether the interval lies below 1.
    """

    name: str
    claim: str
    expected: float | None
    confirmed: bool
    ratio: float | None
    low: float | None
    high: float | None
    confidence: float
    pairs: int
    says: str
    line: str = ""


def suspicions(profile: Profile) -> list[Suspicion]:
    """Return what a profile suggests, and a control can refute."""
    share = {phase.name: phase.share for phase in profile.steps.phases}
    state = {row.name: row.state for row in profile.optimizations}
    found = []
    if share.get("data", 0) > DATA:
        claim = f"waiting for data takes {share['data']:.0%} of a step"
        found.append(Suspicion(CACHED_BATCH, claim, share["data"]))
    if share.get("clip", 0) > CLIP:
        claim = f"clipping takes {share['clip']:.0%} of a step"
        found.append(Suspicion(NO_CLIPPING, claim, share["clip"]))
    if share.get("optimizer", 0) > OPTIMIZER and state.get("fused optimizer") == OFF:
        claim = f"the optimizer loops over parameters and takes {share['optimizer']:.0%} of a step"
        found.append(Suspicion(FUSED_OPTIMIZER, claim, share["optimizer"]))
    live = profile.observed.live
    if live is not None and live.threads > 1 and (live.threads > live.cores or _short(profile)):
        why = "more than there are cores" if live.threads > live.cores else "for operations that are short"
        found.append(Suspicion(ONE_THREAD, f"{live.threads} threads compute, {why}", None))
    return found + _copies(profile)


def _short(profile: Profile) -> bool:
    rows = [row for row in profile.operations.operators if row.calls] if profile.operations else []
    calls = sum(row.calls for row in rows)
    return bool(calls) and sum(row.host_ms for row in rows) / calls < SHORT


def _copies(profile: Profile) -> list[Suspicion]:
    if profile.operations is None:
        return []
    by_line: dict[str, float] = {}
    for row in profile.operations.copies:
        found = _LINE.match(row.line)
        if found:
            by_line[found["place"]] = by_line.get(found["place"], 0.0) + row.share
    return [
        Suspicion(
            WITHOUT_LINE,
            f"copies of {Path(line).name} take {share:.0%} of a traced step",
            share,
            line,
        )
        for line, share in sorted(by_line.items(), key=lambda entry: -entry[1])
        if share > COPIES
    ]


def confirm(
    profile: Profile,
    plan: Plan,
    *,
    module: bool,
    pairs: int,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> tuple[Confirmed, ...]:
    """Run the controls of what a profile suggests.

    Parameters
    ----------
    profile, plan, module:
        The profile, and how it was taken.
    pairs:
        Runs with each control, each beside one without it.
    progress:
        Called with the runs that are done, and how many there are.

    Raises
    ------
    ValueError
        If there are fewer than three pairs, or several ranks.
    """
    if pairs < 3:
        raise ValueError(f"--pairs {pairs}: expected 3 or more, an interval takes as many")
    if world().size > 1:
        raise ValueError("--confirm: controls are run by one process; profile several ranks without it")
    wanted = suspicions(profile)
    outcomes = []
    done, total = 0, 2 * pairs * len(wanted)
    for suspicion in wanted:
        sides: tuple[list[float], list[float]] = ([], [])
        trouble = ""
        for number in range(pairs):
            # The order changes from pair to pair: what the first run warms, it warms for both.
            for on in (False, True) if number % 2 == 0 else (True, False):
                if trouble:
                    continue
                taken = _run(profile, plan, suspicion, module=module, on=on)
                done += 1
                progress(done, total)
                if isinstance(taken, str):
                    trouble = f"{'with' if on else 'without'} the control: {taken}"
                else:
                    sides[on].append(taken)
        outcomes.append(_judged(suspicion, *sides, trouble, pairs))
    return tuple(outcomes)


def _run(profile: Profile, plan: Plan, suspicion: Suspicion, *, module: bool, on: bool) -> float | str:
    """Return the median step of one run in milliseconds, or why there is none."""
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--traced", "0"]
    command += ["--steps", str(plan.steps), *(["-m"] if module else []), profile.script, *profile.arguments]
    told = json.dumps({"name": suspicion.name, "line": suspicion.line, "on": on})
    done = subprocess.run(
        command, env={**os.environ, VARIABLE: told}, capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout)
        code, step = int(answer["exit_code"]), answer["step"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    if code:
        lines = [line for line in done.stderr.strip().splitlines() if line]
        return f"the script failed with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
    if step is None:
        return "no steady step was found"
    return float(step["median_ms"])


def _judged(
    suspicion: Suspicion, without: Sequence[float], with_it: Sequence[float], trouble: str, pairs: int
) -> Confirmed:
    def outcome(says: str, ratio: float | None, low: float | None, high: float | None) -> Confirmed:
        return Confirmed(
            suspicion.name, suspicion.claim, suspicion.expected, high is not None and high < 1, ratio, low,
            high, CONFIDENCE, pairs, says, suspicion.line,
        )  # fmt: skip

    if trouble:
        return outcome(f"not tested: {suspicion.claim}; {trouble}", None, None, None)
    found = paired_difference(without, with_it, CONFIDENCE)
    bounds = f"{found.ratio:.2f} of the time ({found.low:.2f} to {found.high:.2f}, {pairs} pairs of runs)"
    if found.high < 1:
        saved = f"{1 - found.ratio:.0%} of a step, {1 - found.high:.0%} to {1 - found.low:.0%}"
        text = (
            f"confirmed: {suspicion.claim}; with the control ({suspicion.name}) a step takes {bounds}: "
            f"it costs {saved}"
        )
    else:
        text = f"withdrawn: {suspicion.claim}, but with the control ({suspicion.name}) a step takes {bounds}"
    return outcome(text, found.ratio, found.low, found.high)


def control_of_this_run() -> Control | None:
    """Return the control that this process was told to run under, None for none."""
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    found = json.loads(told)
    return Control(found["name"], found.get("line", ""), on=bool(found["on"]))
