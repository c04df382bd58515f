"""What a panel may read: the stored run, what the caller handed over, and frames read only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from backlight.findings.evaluate import separate_hints
from backlight.records import Finding, ParameterRecord
from backlight.report.frames import ParameterFrames, Window, read_frames
from backlight.store.read.run import Run, Scalar
from backlight.text import count, listed, visible

NO_GRADIENT = "no gradient when the optimizer stepped, at any recorded step"
NOT_IN_MODEL = "in an optimizer, but not a parameter of the model"
"""Why a parameter without a recorded reason was not measured."""

Series = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps [S] and values [S]; NaN where a step was not measured."""

T = TypeVar("T")

APART = "ranks measured gradients that do not make up a whole"
"""Why a gradient that ranks measured is not known."""


@dataclass(frozen=True)
class GradientCoverage:
    """Recorded steps [S] of the gradient, and for each of the parameters [P] whether it ever was measured.

    ``unjoined`` is at how many of the steps ranks measured it without making up a whole, ``fewest`` at how
    many the parameter was measured that was measured least.
    """

    steps: NDArray[np.int64]
    measured: NDArray[np.bool_]
    unjoined: NDArray[np.int64]
    fewest: int = 0


@dataclass
class Source:
    """A run as the report sees it, all attempts joined; ``findings`` are without ``hints``, both in order.

    ``health`` is the score over steps and ``untrained`` names the trainable parameters that never train; the
    caller computes both by the rules of their monitor. ``cells`` are those that a heat map may have, None for
    as many as a written report has; ``window`` are the steps that it shows, None for all. ``kept`` is what
    panels read through :meth:`once`.
    """

    run: Run
    findings: Sequence[Finding] = ()
    health: Series | None = None
    untrained: Sequence[str] = ()
    cells: int | None = None
    window: Window | None = None
    kept: dict[Callable[[Any], Any], Any] = field(default_factory=dict, init=False, repr=False)
    hints: Sequence[Finding] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Separate hints from findings."""
        self.findings, self.hints = separate_hints(self.findings)

    def once(self, read: Callable[[Source], T]) -> T:
        """Return what ``read`` returns of this source; it is called once, for all panels of a monitor."""
        if read not in self.kept:
            self.kept[read] = read(self)
        value: T = self.kept[read]
        return value

    @property
    def untrained_text(self) -> str:
        """What the health does not cover: the parameters that never trained."""
        amount = count(len(self.untrained), "parameter")
        has = "has" if len(self.untrained) == 1 else "have"
        return f"{amount} never trained and {has} no health: {listed([visible(n) for n in self.untrained])}"

    def watched(self, monitor: str) -> bool:
        """Return whether ``monitor`` watched; a run that names no monitors is taken to have had all."""
        return not monitor or not self.run.monitors or monitor in self.run.monitors

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last step of the run, recorded or not: every axis of steps shows them all."""
        first = min((attempt.step_offset for attempt in self.run.attempts), default=0)
        return first, max(first, self.run.last_step())

    @property
    def cold_steps(self) -> frozenset[int]:
        """First step of each attempt, which compiles and loads."""
        return frozenset(attempt.step_offset for attempt in self.run.attempts)

    @cached_property
    def step_times(self) -> NDArray[np.float64]:
        """Seconds of every step whose phases were recorded, in order."""
        phases = [self.scalar(name) for name in self.scalar_names("phase")]
        if not phases:
            return np.empty(0)
        steps = np.unique(np.concatenate([scalar.steps for scalar in phases]))
        seconds = np.zeros(len(steps))
        for scalar in phases:
            seconds[np.searchsorted(steps, scalar.steps)] += np.nan_to_num(scalar.values, posinf=0, neginf=0)
        return seconds

    @cached_property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The parameters of the run in model order."""
        return self.run.parameters()

    @cached_property
    def frames(self) -> ParameterFrames:
        """Everything that the page shows per parameter, read once and reduced."""
        return read_frames(self.run, self.parameters, self.cells, self.window)

    @cached_property
    def coverage(self) -> GradientCoverage:
        """What was measured of the gradient at all; cheap next to :attr:`frames`."""
        none = np.zeros(len(self.parameters), np.bool_)
        nothing = GradientCoverage(np.empty(0, np.int64), none, none.astype(np.int64))
        if not self.run.has("gradient"):
            return nothing
        frame = self.run.frame("gradient", "measured")
        seen = {name for i, name in enumerate(frame.names) if frame.measured[:, i].any()}
        ever = np.array([record.name in seen for record in self.parameters], np.bool_)
        unjoined = dict(zip(frame.names, frame.incomplete().sum(axis=0).tolist(), strict=True))
        split = np.array([unjoined.get(record.name, 0) for record in self.parameters], np.int64)
        amounts = frame.measured.sum(axis=0)
        return GradientCoverage(frame.steps, ever, split, int(min(amounts[amounts > 0], default=0)))

    def scalar(self, name: str, source: str = "backlight") -> Scalar:
        """Return a scalar; empty where it was never logged."""
        try:
            return self.run.scalar(name, source=source)
        except KeyError:
            return Scalar(np.zeros(0, np.int64), np.zeros(0), "1")

    def array(
        self, name: str, attempt: int | None = None
    ) -> tuple[NDArray[np.int64], Sequence[NDArray[Any]]]:
        """Return the steps and values of a stored array; empty where it was never stored."""
        is_stored = name in self.run.array_names()
        return self.run.array(name, attempt=attempt) if is_stored else (np.zeros(0, np.int64), [])

    def scalar_names(self, beginning: str) -> list[str]:
        """Return the names of backlight's own scalars below ``beginning/``, sorted."""
        names = self.run.scalar_names(source="backlight")
        return sorted(name for name in names if name.startswith(f"{beginning}/"))

    def reason(self, *subjects: str, otherwise: str) -> str:
        """Return why ``subjects`` were not measured, in the words of the session that watched.

        ``otherwise`` is said where the run holds no word about it.
        """
        for event in self.run.events("unmeasured"):
            if event.payload.get("parameters"):
                continue  # the reason of those parameters, not of the whole
            what = str(event.payload.get("what", ""))
            if what in subjects or what.removeprefix("series/").removeprefix("scalars/") in subjects:
                reason = str(event.payload.get("reason", "")).strip()
                if reason:
                    return reason[0].upper() + reason[1:] + ("" if reason[-1] in ".!?" else ".")
        return otherwise

    def evidence(self, ending: str) -> list[str]:
        """Return the paths of the evidence files with that ending."""
        return [path for path in self.run.evidence() if path.endswith(ending)]

    @cached_property
    def unmeasured_parameters(self) -> dict[str, list[str]]:
        """Names of the parameters that never had a measured gradient, by the reason why."""
        recorded: dict[str, str] = {}
        for event in self.run.events("unmeasured"):
            for name in event.payload.get("parameters") or ():
                recorded.setdefault(str(name), str(event.payload.get("reason", "")))
        coverage = self.coverage
        reasons: dict[str, list[str]] = {}
        for record, measured, unjoined in zip(
            self.parameters, coverage.measured, coverage.unjoined, strict=True
        ):
            if not measured:
                otherwise = APART if unjoined else NO_GRADIENT if record.in_model else NOT_IN_MODEL
                reason = record.unmeasured or recorded.get(record.name) or otherwise
                reasons.setdefault(reason, []).append(record.name)
        return reasons


def rate_labels(run: Run, rates: Sequence[str]) -> dict[str, str]:
    """Return ``AdamW, group 1`` for ``lr/0/1``: by the optimizers' names, as short as the rates differ."""
    stored = run.fingerprint()
    kinds = [kind.partition("(")[0] for kind in stored.optimizers] if stored else []
    groups = [name.removeprefix("lr/").partition("/") for name in rates]
    labels = {}
    for name, (optimizer, _, group) in zip(rates, groups, strict=True):
        index = int(optimizer) if optimizer.isdecimal() else len(kinds)
        label = visible(kinds[index]) if index < len(kinds) else f"optimizer {optimizer}"
        if index < len(kinds) and kinds.count(kinds[index]) > 1:
            label += f" {optimizer}"
        alone = sum(other == optimizer for other, _, _ in groups) == 1
        labels[name] = label if alone or not group else f"{label}, group {group}"
    return labels
