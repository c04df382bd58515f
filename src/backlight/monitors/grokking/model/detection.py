"""The verdict on grokking, from the accuracies of a run alone (docs/formulas.md, section 4).

``grokking`` needs a delay that is long against the time to memorise, for the end of the rise and for its
middle, starts from a test accuracy below half of the way, persists while the training accuracy holds, is
covered by many logs, and exists for every training threshold from .9 to .99. Everything else has its own
verdict. The sharpness of the rise is a second statement, with an interval, and no condition.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from backlight.monitors.grokking.model import curves
from backlight.monitors.grokking.model.curves import Curve, DetectionError, StepInterval
from backlight.monitors.grokking.model.verdicts import (
    Condition,
    Detection,
    GrokkingVerdict,
    SweepPoint,
    Transition,
    VerdictLimits,
    lost,
    refitted,
    transition_of,
)

SWEEP_TRAIN = 4
"""Training accuracies of the sweep, from ``sweep_train_low`` to ``train_accuracy``."""

SWEEP_TEST = 3
"""Shares of the way of the sweep, from ``sweep_test_low`` to ``test_share``."""

NEAR = 1.25
"""A delay below so many times the limit is noted as near it."""

HALF = "delay of half the rise"
"""Name of the condition on the middle of the rise."""

END_SHARE = 0.1
"""Share of the logs, or of the steps, that counts as the end of a run."""


def detect(
    train_steps: ArrayLike,
    train_accuracy: ArrayLike,
    test_steps: ArrayLike,
    test_accuracy: ArrayLike,
    *,
    chance: float | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    limits: VerdictLimits | None = None,
) -> Detection:
    """Return the verdict on the accuracies of one run, with its intervals, conditions, sweep and notes.

    Parameters
    ----------
    train_steps, train_accuracy, test_steps, test_accuracy:
        Steps and shares of samples, arrays of equal length, in any order. A NaN is a log without a
        measurement.
    chance:
        Accuracy of guessing; None if unknown: 0 is used, which requires the longest way.
    train_size, test_size:
        Samples behind an accuracy; None if unknown: the number of distinct values is a lower bound.

    Raises
    ------
    DetectionError
        If nothing was logged, a value is not a share of samples, or a size or chance is impossible.
    """
    train = curves.read_curve(train_steps, train_accuracy, "train accuracy")
    test = curves.read_curve(test_steps, test_accuracy, "test accuracy")
    for name, curve in (("train accuracy", train), ("test accuracy", test)):
        if not len(curve):
            raise DetectionError(
                f"no {name} was logged, so there is no verdict; log it as a share of samples, "
                f"such as watch.log({name.replace(' ', '_')}=0.98)"
            )
    if chance is not None and not 0 <= chance < 1:
        raise DetectionError(f"chance is the accuracy of guessing, 0 <= chance < 1; got {chance!r}")
    for name, size in (("train_size", train_size), ("test_size", test_size)):
        if size is not None and size < 1:
            raise DetectionError(f"{name} counts samples and must be at least 1; got {size!r}")
    return _Evaluation(train, test, chance, train_size, test_size, limits or VerdictLimits()).verdict()


class _Evaluation:
    """One evaluation: curves without doubted zeros, the plateau, and known sizes and chance."""

    def __init__(
        self,
        train: Curve,
        test: Curve,
        chance: float | None,
        train_size: int | None,
        test_size: int | None,
        limits: VerdictLimits,
    ) -> None:
        self.limits, self.known_chance = limits, chance
        self.chance = chance or 0.0
        self.notes = [*train.notes, *test.notes]
        self.size_known = test_size is not None
        # n samples give n + 1 shares.
        self.size = test_size if test_size is not None else max(0, len(np.unique(test.values)) - 1)
        if chance is None:
            self.notes.append(
                "chance is not known and is taken as 0, which requires the longest way; "
                "watch.log(chance=...) or backlight grok detect RUN --chance states it"
            )
        if test_size is None:
            self.notes.append(
                f"the size of the test set is not known; {self.size + 1} different accuracies need at "
                f"least {self.size} samples; watch.log(test_size=...) or --test-size states it"
            )
        self.train, _ = self._trusted(train, train_size, "train accuracy")
        self.test, self.doubted = self._trusted(test, test_size, "test accuracy")
        self.plateau = curves.plateau(self.test, limits.stay_logs)
        self.last = int(max(train.steps[-1], test.steps[-1]))
        self.logged = (len(train), len(test))
        # Whether the plateau of the test accuracy is far enough above chance.
        self.learned = (self.plateau - self.chance) / (1 - self.chance) >= limits.plateau_minimum

    def _trusted(self, curve: Curve, size: int | None, name: str) -> tuple[Curve, Curve]:
        """Split a curve into the trusted logs and the zeros that look like fillers."""
        likely = 1.0 if self.known_chance == 0 else 0.0
        if self.known_chance and size:
            likely = (1 - self.known_chance) ** size
        plausible = likely >= self.limits.zero_probability
        doubted = curves.doubted_zeros(curve, self.limits.zero_logs, plausible=plausible, low=self.chance / 2)
        if doubted.any():
            self.notes.append(
                f"{name}: {int(doubted.sum())} of {len(curve)} logs are exactly 0 as if filled in where "
                "nothing was measured, and count as not logged"
            )
        return curve.without(doubted), curve.without(~doubted)

    def way(self, share: float) -> float:
        """Return the accuracy at ``share`` of the way from chance to plateau."""
        return self.chance + share * (self.plateau - self.chance)

    def level(self) -> float:
        """Return the accuracy that defines t_generalise, which needs no more than ``test_share`` itself."""
        return min(self.limits.test_share, self.way(self.limits.test_share))

    def verdict(self) -> Detection:
        """Return the verdict: each condition in order, then the sweep."""
        memorised, generalised = self._times()
        if min(map(len, (self.train, self.test))) < self.limits.stay_logs:
            return self._detection(
                GrokkingVerdict.INSUFFICIENT_DATA,
                f"Only {len(self.train)} train and {len(self.test)} test accuracies were logged; "
                f"{self.limits.stay_logs} of each are the least.",
                memorised,
                generalised,
            )
        if memorised is None:
            return self._never_memorised()
        if generalised is None:
            verdict, claim = self._never_generalised(memorised)
            return self._detection(verdict, f"The run memorised by step {memorised.by}{claim}", memorised)
        return self._both(memorised, generalised)

    def _times(self) -> tuple[StepInterval | None, StepInterval | None]:
        """Return t_memorise and t_generalise; the second only if the plateau is a generalisation."""
        limits = self.limits
        memorised = curves.first_stay(self.train, limits.train_accuracy, limits.stay_logs)
        if not self.learned:
            return memorised, None
        return memorised, curves.first_stay(self.test, self.level(), limits.stay_logs)

    def _never_memorised(self) -> Detection:
        values, needed, logs = self.train.values, self.limits.train_accuracy, self.limits.stay_logs
        reached = int((values >= needed).sum())
        if curves.ends_above(self.train, needed):
            return self._detection(
                GrokkingVerdict.CENSORED,
                f"The run ends at step {self.last}, less than {logs} logs after the training "
                f"accuracy reached {needed:g}.",
            )
        if reached >= logs:
            return self._detection(
                GrokkingVerdict.UNSTABLE,
                f"The training accuracy was at {needed:g} at {reached} logs and never for {logs} in a row.",
            )
        return self._detection(
            GrokkingVerdict.NOT_FITTED,
            f"The training accuracy did not reach {needed:g} by step {self.last}; its highest value is "
            f"{float(values.max()):.3g}, at step {self.train.steps[int(np.argmax(values))]}.",
        )

    def _never_generalised(self, memorised: StepInterval) -> tuple[GrokkingVerdict, str]:
        strong = self.limits.delay_ratio_strong
        tail = self.learned and curves.ends_above(self.test, self.level())
        if len(self.doubted) and not len(self.test.between(memorised.by, self.last + 1)):
            return GrokkingVerdict.INSUFFICIENT_DATA, (
                "; after that every test accuracy is exactly 0, as if it was not measured."
            )
        if tail or self._rise() > self.limits.rising:
            what = "less than enough logs after it generalised" if tail else "while its test accuracy rises"
            return GrokkingVerdict.CENSORED, (
                f" and ends at step {self.last} {what} (at {float(self.test.values[-1]):.3g}): "
                "the outcome is unknown."
            )
        if self.last < strong * max(1, memorised.by):
            return GrokkingVerdict.CENSORED, (
                f" and ends at step {self.last}, before {strong:g} times that: "
                "too early to say that it does not generalise."
            )
        return GrokkingVerdict.MEMORISED, (
            f" and did not generalise until step {self.last}: its test accuracy held at most "
            f"{self.plateau:.3g}."
        )

    def _rise(self) -> float:
        """Return how far the test accuracy rose over the last fifth of the steps, chance taken off."""
        # Of the steps: where logs are spaced logarithmically, a fifth of them is most of a run.
        end, logs = float(self.test.steps[-1]), self.limits.stay_logs
        width = END_SHARE * (end - float(self.test.steps[0]))
        last = curves.level_in(self.test, end - width, end, logs)
        before = curves.level_in(self.test, end - 2 * width, end - width, logs)
        return (last - before) / (1 - self.chance)

    def _both(self, memorised: StepInterval, generalised: StepInterval) -> Detection:
        ratio = _ratio(memorised, generalised)
        transition = self._transition(memorised, generalised)
        conditions = self._conditions(memorised, generalised)
        sweep = self._sweep()
        verdict, words = self._delayed(memorised, generalised, conditions, sweep)
        shape = f" The rise is {transition.words}." if transition and verdict in _SWEPT else ""
        strong = verdict is GrokkingVerdict.GROKKING and ratio[0] >= self.limits.delay_ratio_strong
        return self._detection(
            verdict,
            f"{'Strong generalisation.' if strong else words} It memorised in steps {memorised} and "
            f"generalised in steps {generalised}, {_times(ratio)} the time to memorise.{shape}",
            memorised,
            generalised,
            strong=strong,
            ratio=ratio,
            transition=transition,
            conditions=conditions,
            memorised_test=self._start(memorised, generalised),
            sweep=sweep if verdict in _SWEPT else (),
        )

    def _delayed(
        self,
        memorised: StepInterval,
        generalised: StepInterval,
        conditions: tuple[Condition, ...],
        sweep: tuple[SweepPoint, ...],
    ) -> tuple[GrokkingVerdict, str]:
        """Evaluate a run that did both, in the order in which a condition makes the next one meaningful."""
        limits = self.limits
        outcomes = {condition.name: condition.held for condition in conditions}
        if np.median(curves.ending(self.test, END_SHARE, limits.stay_logs)) < self.way(0.5):
            return (
                GrokkingVerdict.UNSTABLE,
                "The test accuracy did not stay at the level that it had reached.",
            )
        if generalised.by / max(1, memorised.by) < limits.delay_ratio:
            return GrokkingVerdict.NO_DELAY, "The run generalised about when it memorised."
        if self._recovered(memorised, generalised):
            return (
                GrokkingVerdict.UNSTABLE,
                "The test accuracy lost, before it rose, what it had reached without a delay: a recovery or "
                "double descent, not grokking.",
            )
        if outcomes["training accuracy lasts"] is False:
            return (
                GrokkingVerdict.UNSTABLE,
                "Between the two times the training accuracy was lost: a recovery, not grokking.",
            )
        if self._refitted(memorised, generalised):
            return (
                GrokkingVerdict.UNSTABLE,
                "The test accuracy rose while the run fitted training data for a second time: a curriculum "
                "or a recovery, not grokking.",
            )
        if outcomes["starts from below"] is False:
            return (
                GrokkingVerdict.NO_DELAY,
                "The run was more than half way to generalising when it memorised: slow, but no delay.",
            )
        if outcomes[HALF] is False:
            return (
                GrokkingVerdict.NO_DELAY,
                f"Half of the rise of the test accuracy came within {limits.delay_ratio:g} times the time to "
                "memorise: a slow end, but no delay.",
            )
        if generalised.by - memorised.by < limits.delay_steps:
            return (
                GrokkingVerdict.NO_DELAY,
                f"The run generalised {generalised.by - memorised.by} steps after it memorised: start-up, no "
                "delay.",
            )
        doubt = self._doubt(memorised, generalised, outcomes)
        if doubt:
            return GrokkingVerdict.INSUFFICIENT_DATA, doubt
        if self.plateau < limits.test_share and self._rise() > limits.rising:
            return GrokkingVerdict.CENSORED, "The test accuracy still rises at the end."
        missed = next((point for point in sweep if not point.grokking), None)
        if missed is not None:
            return (
                GrokkingVerdict.THRESHOLD_ARTEFACT,
                f"Grokking by these thresholds, but not at a training accuracy of "
                f"{missed.train_accuracy:.3g} with {missed.test_share:.3g} of the way.",
            )
        if _ratio(memorised, generalised)[0] < NEAR * limits.delay_ratio:
            self.notes.append(
                f"the delay is near the limit of {limits.delay_ratio:g} times: another seed may have none"
            )
        return GrokkingVerdict.GROKKING, "Delayed generalisation."

    def _doubt(
        self, memorised: StepInterval, generalised: StepInterval, outcomes: dict[str, bool | None]
    ) -> str:
        """Return why the data do not support a verdict of grokking; empty if they do."""
        filled = self.doubted.between(memorised.after - 1, generalised.by)
        values = self.test.between(memorised.by, generalised.by).values
        if len(filled):
            return (
                f"{len(filled)} test accuracies before generalisation are exactly 0, as if filled in where "
                "nothing was measured: log measured values only."
            )
        if memorised.by <= 0 or memorised.after < 0:
            return "The run had memorised at its first log: the time is unknown."
        if not outcomes["delay"]:
            return "The logs are too far apart to bound the delay."
        if not outcomes["logs between"]:
            return f"There are fewer than {self.limits.logs_between} logs between the two times."
        if outcomes["starts from below"] is None:
            return "No test accuracy was logged when the run memorised."
        if len(np.unique(values)) == 1:
            return (
                f"The test accuracy is exactly {values[0]:.4g} at every log between the two times: "
                "it looks like a filler."
            )
        if not outcomes["test set"]:
            return f"The test set is too small for a verdict (at least {self.size} samples)."
        return ""

    def _start(self, memorised: StepInterval, generalised: StepInterval) -> float | None:
        """Return the first test accuracy from memorisation to generalisation, None without one."""
        values = self.test.between(memorised.by - 1, generalised.by).values
        return float(values[0]) if len(values) else None

    def _conditions(self, memorised: StepInterval, generalised: StepInterval) -> tuple[Condition, ...]:
        limits = self.limits
        ratio = _ratio(memorised, generalised)
        transition = self._transition(memorised, generalised)
        trains = self.train.between(memorised.by, generalised.by)
        between = min(len(self.test.between(memorised.by, generalised.by)), len(trains))
        start, half = self._start(memorised, generalised), self.way(limits.test_share_memorised)
        level = min(limits.train_stays, limits.train_accuracy)
        lasting = float((trains.values >= level).mean()) if len(trains) else None
        low, _ = curves.wilson(min(1.0, self.plateau), max(1, self.size))
        needed = self.way(limits.wilson_share)
        return (
            Condition(
                "delay",
                f"at least {limits.delay_ratio:g} times",
                _times(ratio),
                ratio[0] >= limits.delay_ratio,
            ),
            Condition(
                "delay in steps",
                f"at least {limits.delay_steps}",
                str(generalised.by - memorised.by),
                generalised.by - memorised.by >= limits.delay_steps,
            ),
            Condition(
                HALF,
                f"at least {limits.delay_ratio:g} times",
                "not observed" if transition is None else f"{10**transition.distance:.3g} times",
                None if transition is None else 10**transition.distance >= limits.delay_ratio,
            ),
            Condition(
                "logs between",
                f"at least {limits.logs_between}",
                str(between),
                between >= limits.logs_between,
            ),
            Condition(
                "starts from below",
                f"at most {half:.3g}",
                "not logged" if start is None else f"{start:.3g}",
                None if start is None else start <= half,
            ),
            Condition(
                "training accuracy lasts",
                f"{level:g} at {limits.train_stays_share:.0%} of logs",
                "no log between" if lasting is None else f"at {lasting:.1%}",
                None if lasting is None else lasting >= limits.train_stays_share,
            ),
            Condition(
                "test set",
                f"bound at least {needed:.3g}",
                f"{low:.3g}, {'' if self.size_known else 'at least '}{self.size} samples",
                low >= needed,
            ),
        )

    def _transition(self, memorised: StepInterval, generalised: StepInterval) -> Transition | None:
        start = max(self.chance, self._start(memorised, generalised) or 0.0)
        return transition_of(
            self.test,
            start,
            self.plateau,
            memorised.by,
            self.limits.stay_logs,
            size=self.size,
            sharp=self.limits.transition_decades,
        )

    def _sweep(self) -> tuple[SweepPoint, ...]:
        """Evaluate with other thresholds; all else is as in the verdict itself.

        The middle of the rise is not: it begins where the run memorised, which the thresholds move.
        """
        limits = self.limits
        moved = copy.copy(self)
        points = []
        for train in np.linspace(limits.sweep_train_low, limits.train_accuracy, SWEEP_TRAIN).tolist():
            for share in np.linspace(limits.sweep_test_low, limits.test_share, SWEEP_TEST).tolist():
                moved.limits = replace(limits, train_accuracy=train, test_share=share)
                memorised, generalised = moved._times()
                holds = (
                    memorised is not None
                    and generalised is not None
                    and all(
                        condition.held
                        for condition in moved._conditions(memorised, generalised)
                        if condition.name != HALF
                    )
                )
                points.append(SweepPoint(train, share, memorised, generalised, holds))
        return tuple(points)

    def _recovered(self, memorised: StepInterval, generalised: StepInterval) -> bool:
        """Return whether the test accuracy lost before t_generalise what it had reached without a delay."""
        early = self.limits.delay_ratio * max(1, memorised.by)
        return lost(
            self.test, self.way, early, generalised.by, share=self.limits.lost, size=max(1, self.size)
        )

    def _refitted(self, memorised: StepInterval, generalised: StepInterval) -> bool:
        limits, way, late = self.limits, self.way, generalised.by
        fitted, broken = limits.train_accuracy, limits.refit
        return refitted(self.train, self.test, way, memorised.by, late, fitted=fitted, broken=broken)

    def _detection(
        self,
        verdict: GrokkingVerdict,
        claim: str,
        memorised: StepInterval | None = None,
        generalised: StepInterval | None = None,
        **more: Any,
    ) -> Detection:
        has = len(self.test) > 0
        return Detection(
            verdict=verdict,
            claim=claim,
            memorised=memorised,
            generalised=generalised,
            plateau=self.plateau if has else None,
            test_accuracy=self.level() if has and self.learned else None,
            chance=self.known_chance,
            test_size=self.size,
            test_size_known=self.size_known,
            wilson=curves.wilson(min(1.0, self.plateau), self.size) if has and self.size else None,
            logs=self.logged,
            last_step=self.last,
            notes=tuple(self.notes),
            **more,
        )


_SWEPT = {GrokkingVerdict.GROKKING, GrokkingVerdict.THRESHOLD_ARTEFACT}


def _ratio(memorised: StepInterval, generalised: StepInterval) -> tuple[float, float | None]:
    """Return the bounds of t_generalise / t_memorise that the two intervals leave."""
    low = max(0, generalised.after) / max(1, memorised.by)
    return low, generalised.by / memorised.after if memorised.after > 0 else None


def _times(ratio: tuple[float, float | None]) -> str:
    low, high = ratio
    return f"at least {low:.3g} times" if high is None else f"{low:.3g} to {high:.3g} times"
