"""Errors of a training loop, and loops that come close to one, trained under the monitors."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.records import Finding, Severity
from backlight.store.read.run import Run
from faults.injection import Fault, text_of
from faults.silent import CONTROLS, FAULTS, habits, published_cases, well_known
from faults.silent.habits import Habits

MONITORS = ("health", "correctness")


def watched(
    path: Path, train: Callable[[], object], monitors: Collection[str] = MONITORS
) -> tuple[Run, Findings]:
    """Return the run of a training loop, and its findings."""
    torch.manual_seed(0)
    with backlight.watch(run=path, every=1, monitors=monitors, quiet=True):
        train()
    run = backlight.open_run(path)
    return run, evaluate_rules(run)


def alarms(findings: Iterable[Finding]) -> list[str]:
    """Return the rules of warnings and errors."""
    return sorted({finding.rule for finding in findings if finding.severity is not Severity.INFO})


def judged(findings: Findings, rule: str = "") -> list[str]:
    """Return the rules of warnings and errors on the loop, and of ``rule``: others need longer runs."""
    return alarms([f for f in findings if f.monitor == "correctness" or f.rule == rule])


def expected_faults() -> dict[str, Fault]:
    """Return the errors of one process that are to be found, by name."""
    every = {**FAULTS, **published_cases.CASES, **well_known.FAULTS}
    return {name: one for name, one in every.items() if "rule" in one.expected}


@dataclass(frozen=True)
class HabitRun:
    """A program to be trained with some habits: an error, its control, or a loop that comes close to one."""

    name: str
    kind: str
    habits: Habits

    def problem(self) -> str:
        """Return what differs from what is expected, empty if nothing does."""
        counters.clear()  # what an earlier program has compiled does not count
        with habits.practised(self.habits), tempfile.TemporaryDirectory() as folder:
            if self.kind == "close":
                findings = watched(Path(folder) / "run", CONTROLS[self.name])[1]
            else:
                fault = expected_faults()[self.name]
                findings = watched(Path(folder) / "run", lambda: fault.train(self.kind == "error"))[1]
        if self.kind == "close":
            return ", ".join(judged(findings))
        expected = fault.expected
        if self.kind == "control":
            return ", ".join(judged(findings, str(expected["rule"])))
        wanted = (expected["rule"], expected["severity"])
        if not any(
            (one.rule, one.severity.value) == wanted and str(expected.get("names", "")) in text_of(one)
            for one in findings
        ):
            return f"not found, but {[(one.rule, one.severity.value, one.title) for one in findings]}"
        others = set(judged(findings)) - {expected["rule"], *expected.get("also", ())}  # type: ignore[misc]
        return f"also {', '.join(sorted(others))}" if others else ""


def habit_runs(strength: int, share: float = 1.0, seed: int = 0) -> Sequence[HabitRun]:
    """Return every program with every row of :func:`habits.covering`, or a share of them at random.

    An error is left out with the habits that hide it, which its ``hidden_by`` names.
    """
    rows = habits.covering(strength)
    faults = [(name, kind) for name in expected_faults() for kind in ("error", "control")]
    programs = [*faults, *((name, "close") for name in CONTROLS)]
    every = [HabitRun(name, kind, row) for name, kind in programs for row in rows]
    hidden = {name: fault.expected.get("hidden_by", ()) for name, fault in expected_faults().items()}
    every = [
        run
        for run in every
        if run.kind != "error" or not any(getattr(run.habits, habit) for habit in hidden[run.name])  # type: ignore[attr-defined]
    ]
    return every if share >= 1 else random.Random(seed).sample(every, round(share * len(every)))
