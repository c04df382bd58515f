"""Rule ``schedule``: steps of a learning rate schedule at the wrong time, and one that has run out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.findings.phrases import optimizer_name
from backlight.findings.recorded_steps import step_weights
from backlight.monitors.correctness.model.facts import Fact, facts_by_kind, facts_of, finding_on
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import percent


@dataclass(frozen=True)
class ScheduleLimits(Limits, monitor="correctness"):
    """Limits of the rule ``schedule``."""

    decayed_rate: float = limit(
        1e-5,
        "share of its highest value below which a learning rate trains nothing; OneCycleLR ends at 4e-6, a "
        "cosine at 0, both at their last steps only",
        high=1.0,
    )
    decayed_share: float = limit(
        0.33, "share of the steps of the optimizer that are taken at such a rate", high=1.0
    )
    decayed_steps: int = limit(20, "steps at such a rate", low=1)


class BeforeOptimizer(Fact, rule="schedule", kind="before_optimizer"):
    """The first step of a schedule came before that of its optimizer."""

    schedule: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        name = self.schedule
        return self.finding(
            f"{name} takes its first step before the optimizer",
            f"`{name}.step()` was called before the first `optimizer.step()`: the first value of the "
            "schedule is never used, and every other one comes a step early.",
            severity=Severity.INFO,
            evidence=(name, "schedule"),
            fix="Call `scheduler.step()` after `optimizer.step()`.",
            refuted_if="the first value is skipped on purpose, as a warm-up that begins at 0.",
        )


class PerBatch(Fact, rule="schedule", kind="per_batch"):
    """A schedule took a step with every step of the optimizer, and ran out within an epoch."""

    schedule: str
    taken: int
    batches: int
    is_past: bool
    rate: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        rate = phrases.number(self.rate)
        happened = (
            f"it is past its minimum and rises again (now {rate})"
            if self.is_past
            else f"the learning rate has fallen to {rate}, less than a thousandth of the first one"
        )
        return self.finding(
            f"{self.schedule} runs out after {self.taken:,} steps",
            f"`{self.schedule}.step()` is called with every step of the optimizer. After {self.taken:,} of "
            f"them {happened}; the loader has {self.batches:,} batches an epoch. Its settings count epochs, "
            "or are too small.",
            evidence=(self.taken, "steps of the schedule"),
            fix="Call `scheduler.step()` once per epoch, or give the schedule its length in steps.",
            refuted_if="the learning rate is meant to go through its schedule several times per epoch.",
        )


class PerEpoch(Fact, rule="schedule", kind="per_epoch"):
    """A schedule of ``length`` steps took few of them in ``updates`` steps of its optimizer.

    ``in_epoch`` are those of an epoch by its arguments; 0 where the run ended after ``length`` steps.
    """

    schedule: str
    taken: int
    length: int
    updates: int
    in_epoch: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        created = f" with `steps_per_epoch={self.in_epoch}`" if self.in_epoch else ""
        is_at_end = not self.in_epoch and abs(self.updates - self.length) <= 1
        until = "Until the end of the run, at step" if is_at_end else "By step"
        is_clear = bool(self.in_epoch) or self.schedule == "OneCycleLR"
        return self.finding(
            f"{self.schedule} took {self.taken:,} steps, the optimizer {self.updates:,}",
            f"{self.schedule} was created{created} for {self.length:,} steps. {until} {self.step:,} the "
            f"optimizer has taken {self.updates:,}, and `{self.schedule}.step()` was called {self.taken:,} "
            "times, as a schedule of epochs: the learning rate has hardly left its first value.",
            severity=Severity.WARNING if is_clear else Severity.INFO,
            evidence=(self.taken, "steps of the schedule"),
            fix=(
                "Call `scheduler.step()` after each `optimizer.step()`. With Lightning, return "
                '`{"scheduler": scheduler, "interval": "step"}` from `configure_optimizers`.'
            ),
            refuted_if=f"the schedule is to last {self.length:,} epochs, and the run was to be longer.",
        )


class PastEnd(Fact, rule="schedule", kind="past_end"):
    """A cosine is past its minimum, with ``count`` steps per step of the optimizer, in so many processes."""

    schedule: str
    count: int
    taken: int
    length: int
    processes: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        per_process = "once per process" if self.count == self.processes else "once per microbatch"
        return self.finding(
            f"{self.schedule} takes {self.count} steps per step of the optimizer, and rises again",
            f"`{self.schedule}.step()` is called {self.count} times for each `optimizer.step()`, as if "
            f"{per_process}. It was created for {self.length:,} steps and has taken {self.taken:,} by step "
            f"{self.step:,}: the learning rate was at its minimum after {self.length // self.count:,} steps "
            "of the optimizer, and rises since then.",
            evidence=(self.taken, "steps of the schedule"),
            fix=(
                "Call `scheduler.step()` once after each `optimizer.step()`, or create the schedule for "
                f"{self.count} times as many steps."
            ),
            refuted_if="the learning rate is meant to rise and fall again and again.",
        )


class WrongDirection(Fact, rule="schedule", kind="wrong_direction"):
    """A plateau schedule has cut the rate ``cuts`` times or more; of its metrics the first is the best."""

    schedule: str
    mode: str
    cuts: int
    first: float
    last: float

    def _finding(self, facts: Sequence[Self]) -> Finding:
        is_max, first, last = self.mode == "max", phrases.number(self.first), phrases.number(self.last)
        moves, other = ("falls", "min") if is_max else ("rises", "max")
        return self.finding(
            f"{self.schedule}(mode='{self.mode}') cuts the learning rate while its metric {moves}",
            f"Its metric went from {first} to {last}, and in mode '{self.mode}' the first is the best: no "
            f"value since then counted as better, and the learning rate was cut at least {self.cuts} times.",
            severity=Severity.WARNING if is_max else Severity.INFO,
            evidence=(self.cuts, "cuts of the learning rate"),
            fix=f"For a {'loss' if is_max else 'score such as an accuracy'}, pass `mode='{other}'`.",
            refuted_if=(
                "the metric is a score that gets worse."
                if is_max
                else "the metric is a loss that rises from its first value on, as when the model overfits."
            ),
        )


class SeveralSteps(Fact, event="schedule_steps"):
    """A schedule takes ``count`` steps per step of its optimizer, in a job of so many processes."""

    schedule: str
    count: int
    processes: int

    def __str__(self) -> str:
        reason = " It steps once per process." if self.count == self.processes else ""
        return f" `{self.schedule}.step()` is called {self.count} times per step of the optimizer.{reason}"


@rule("schedule", monitor="correctness", version=3, limits=ScheduleLimits)
def schedule(run: Run, limits: ScheduleLimits) -> Iterator[Finding]:
    """Find schedules that take a step before the optimizer, run out in an epoch, or long before the end."""
    groups = facts_by_kind(run, "schedule")
    for facts in groups:
        for name in dict.fromkeys(fact.schedule for fact in facts):
            yield finding_on([next(fact for fact in facts if fact.schedule == name)])
    if not any(isinstance(facts[0], (PerBatch, PerEpoch)) for facts in groups):
        yield from _decayed(run, limits)


def _decayed(run: Run, limits: ScheduleLimits) -> Iterator[Finding]:
    """Find optimizers all of whose learning rates have decayed to nothing while they take further steps."""
    several = next(iter(facts_of(run, SeveralSteps)), None)
    is_per_process = several is not None and several.count == several.processes
    rates: dict[int, list[str]] = {}
    for name in run.scalar_names("backlight"):
        if name.startswith("lr/"):
            rates.setdefault(int(name.split("/")[1]), []).append(name)
    for number, names in sorted(rates.items()):
        groups = [run.scalar(name) for name in names]
        steps = np.unique(np.concatenate([group.steps for group in groups]))
        shares = np.zeros(len(steps))  # of its highest value, that of the group which has decayed least
        for group in groups:
            if len(group.values) and (peak := np.nanmax(group.values)) > 0:
                rows = np.searchsorted(steps, group.steps)
                shares[rows] = np.fmax(shares[rows], group.values / peak)
        if not len(steps) or shares.max() <= 0:
            continue
        after = np.arange(len(steps)) > int(np.argmax(shares))  # a warm-up may begin at 0
        weights = step_weights(steps)
        low = after & (shares <= limits.decayed_rate)
        spent = float(weights[low].sum())
        if spent < max(limits.decayed_steps, limits.decayed_share * float(weights.sum())):
            continue
        main = max(groups, key=lambda group: float(np.nanmax(group.values)))
        top, row = int(np.nanargmax(main.values)), int(np.flatnonzero(low)[0])
        at = int(steps[row])
        rate = float(main.values[min(int(np.searchsorted(main.steps, at)), len(main.values) - 1)])
        name = names[groups.index(main)]
        yield Finding(
            severity=Severity.WARNING,
            title=f"The learning rate has decayed to {phrases.number(rate)} by step {at}",
            detail=(
                f"The learning rate of {optimizer_name(run, number)} is "
                f"{phrases.number(main.values[top])} at step {int(main.steps[top])} and "
                f"{phrases.number(rate)} at step {at}, and {spent:.0f} of {weights.sum():.0f} steps "
                f"({percent(spent / weights.sum())}) are taken at such a rate: they change nothing."
                f"{several or ''}"
            ),
            subject=Subject(step=at),
            evidence=(
                phrases.scalar(name, int(main.steps[top]), float(main.values[top])),
                phrases.scalar(name, at, rate),
            ),
            fix=(
                "Create the schedule for the steps of the whole run times the number of processes: "
                "`accelerator.prepare` makes it step once per process. Or do not prepare it."
                if is_per_process
                else "Give the schedule the number of steps of the whole run, and call `scheduler.step()` "
                "once per step of the optimizer: two calls use it up in half of them."
            ),
            refuted_if="the training is to go on at that rate, for instance to collect statistics.",
        )
