"""What the run directory of a case says, where it ran under ``backlight run``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from backlight.diagnose.matrix.observations import StallSeen
from backlight.records import Finding, Fingerprint, to_json
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run

RULE = "stall"
"""Name of the rule whose findings the sidecar makes."""

OVER = "stall_over"
"""Kind of the event that says that what stood still moves again."""

_STEPS = 5
"""First steps whose scalars are compared between a case and its control."""

_CLOCKS = ("cost", "time", "phase")
"""Scalars that no two runs share, whatever the knob."""


@dataclass(frozen=True)
class RunSeen:
    """A run directory in what a comparison needs. ``scalars`` holds the first values of each scalar."""

    fingerprint: Fingerprint | None
    parameters: tuple[tuple[str, tuple[int, ...], str, bool], ...]
    scalars: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()


def steps_at(path: Path, moments: Sequence[float]) -> tuple[int, ...] | None:
    """Return how many steps were over at each moment, None where the run cannot tell.

    The times are those that the training itself stamped, so that a late write shows no progress.

    Parameters
    ----------
    path:
        The run directory.
    moments:
        Seconds since the Unix epoch.
    """
    try:
        times = open_run(path).scalar("time")
    except (StoreError, OSError):
        return None
    if not len(times.steps):
        return None
    return tuple(int(times.steps[times.values <= m].max(initial=-1)) + 1 for m in moments)


def stalls_of(path: Path, root: Path) -> tuple[StallSeen, ...]:
    """Return the findings about stalls that stand in the run, oldest first."""
    try:
        run = open_run(path)
        found = [f for f in run.stored_findings() if f.rule == RULE and f.subject.verdict]
        events = sorted((e for kind in (RULE, OVER) for e in run.events(kind)), key=lambda e: e.time)
    except (StoreError, OSError):
        return ()
    over = bool(events) and events[-1].kind == OVER
    return tuple(_stall(f, path.relative_to(root).as_posix(), over=over) for f in found)


def _stall(finding: Finding, path: str, *, over: bool) -> StallSeen:
    subject = finding.subject
    return StallSeen(
        verdict=str(subject.verdict),
        claim=finding.detail,
        phase=subject.phase or "",
        line=subject.line or "",
        rank=subject.rank,
        parameter=subject.parameter or "",
        refuted_if=finding.refuted_if,
        path=path,
        over=over,
    )


def read_run(path: Path) -> RunSeen | None:
    """Read what a comparison needs, None where there is no run that can be read."""
    try:
        return _read(open_run(path))
    except (StoreError, OSError):
        return None


def _read(run: Run) -> RunSeen:
    scalars = {}
    for name in run.scalar_names("backlight"):
        if name.split("/")[0] not in _CLOCKS:
            scalar = run.scalar(name)
            pairs = zip(scalar.steps[:_STEPS].tolist(), scalar.values[:_STEPS].tolist(), strict=True)
            scalars[name] = tuple((int(s), float(v)) for s, v in pairs)
    parameters = tuple((p.name, p.shape, f"{p.dtype} {p.device}", p.requires_grad) for p in run.parameters())
    return RunSeen(run.fingerprint(), parameters, scalars)


def differences(one: RunSeen, other: RunSeen) -> tuple[list[str], list[str]]:
    """Return what differs for certain, and what may also differ by chance, between two runs.

    Arguments, script and host are what was asked for and where, not what came of it; losses differ
    also where a training is not seeded.
    """
    certain: list[str] = []
    if one.fingerprint and other.fingerprint:
        mine, its = to_json(one.fingerprint), to_json(other.fingerprint)
        # A module table and its hash are one difference.
        skipped = {"script", "arguments", "host", "module_hash"}
        certain += [
            f"fingerprint {k}: {_say(its[k], mine[k])}"
            for k in mine
            if k not in skipped and mine[k] != its[k]
        ]
    if one.parameters and other.parameters and one.parameters != other.parameters:
        certain.append("the table of parameters")
    perhaps: list[str] = []
    for name in sorted(one.scalars.keys() & other.scalars.keys()):
        mine_by, its_by = dict(one.scalars[name]), dict(other.scalars[name])
        for step in sorted(mine_by.keys() & its_by.keys()):
            a, b = its_by[step], mine_by[step]
            if a != b and not (np.isnan(a) and np.isnan(b)):
                target = certain if (name == "backwards" or name.startswith("lr/")) and step == 0 else perhaps
                target.append(f"{name} at step {step}: {a:.6g} and {b:.6g}")
                break
    return certain, perhaps


def _say(before: object, after: object) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [k for k in after.keys() | before.keys() if before.get(k) != after.get(k)]
        return ", ".join(f"{k} {before.get(k, 'none')} and {after.get(k, 'none')}" for k in sorted(keys))
    if isinstance(before, (list, tuple)):
        return f"{len(before)} and {len(after) if isinstance(after, (list, tuple)) else 0} entries"
    return f"{before} and {after}"
