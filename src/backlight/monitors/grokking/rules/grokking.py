"""Rule ``grokking``: whether the run groks, memorises, or cannot be judged, with its two times."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backlight.monitors.grokking.model.curves import DetectionError, Interval
from backlight.monitors.grokking.model.reader import TEST, TRAIN, detect_run, has_accuracies
from backlight.monitors.grokking.model.thresholds import Thresholds
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

_DOUBTED = {
    GrokkingVerdict.UNSTABLE,
    GrokkingVerdict.THRESHOLD_ARTEFACT,
    GrokkingVerdict.INSUFFICIENT_DATA,
}
"""Verdicts that ask for another look; the others are remarks."""

_NEXT = {
    GrokkingVerdict.GROKKING: (
        "Run the matched control (--control random-labels) and compare: only what the control does not "
        "show has to do with generalisation."
    ),
    GrokkingVerdict.NO_DELAY: "For a delay take a smaller training share or a larger initialisation.",
    GrokkingVerdict.MEMORISED: "Run longer, or with more weight decay, before saying that it never will.",
    GrokkingVerdict.NOT_FITTED: "Look at the training loss: a larger learning rate, or more steps?",
    GrokkingVerdict.UNSTABLE: "Look at both accuracies; compare with a lower learning rate.",
    GrokkingVerdict.THRESHOLD_ARTEFACT: "Look at the sweep: backlight grok detect RUN prints it.",
    GrokkingVerdict.INSUFFICIENT_DATA: "Log both accuracies more often, and only what was measured.",
    GrokkingVerdict.CENSORED: "Go on with the run (--resume), at least to five times the time to memorise.",
}

_REFUTED = {
    GrokkingVerdict.GROKKING: (
        "logs between the two show a test accuracy that rose with the training accuracy, or the run with "
        "another order of test samples gives other times."
    ),
    GrokkingVerdict.NO_DELAY: "denser logs show a delay that these hide.",
    GrokkingVerdict.MEMORISED: "the same run, continued, generalises.",
    GrokkingVerdict.NOT_FITTED: "the training accuracy was measured on other samples than were trained on.",
    GrokkingVerdict.UNSTABLE: "the dips are of the evaluation (dropout left on), not of the net.",
    GrokkingVerdict.THRESHOLD_ARTEFACT: "a longer run holds the verdict at every line of the sweep.",
    GrokkingVerdict.INSUFFICIENT_DATA: "more logs, or a larger test set, allow another verdict.",
    GrokkingVerdict.CENSORED: "the same run, continued, stays as it is.",
}


@rule(
    "grokking",
    monitor="grokking",
    thresholds=(
        "train_accuracy",
        "test_share",
        "stay_logs",
        "delay_ratio",
        "delay_ratio_strong",
        "logs_between",
        "test_share_memorised",
        "train_stays",
        "train_stays_share",
        "sweep_train_low",
        "sweep_test_low",
        "plateau_minimum",
        "wilson_share",
        "zero_logs",
        "zero_probability",
        "rising",
    ),
)
def grokking(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """State the verdict of a run that logged both accuracies; silent where it did not."""
    if not has_accuracies(run):
        return
    try:
        found = detect_run(run, limits)
    except DetectionError as error:
        yield Finding(
            severity=Severity.WARNING,
            title="The logged accuracies cannot be evaluated",
            detail=f"The accuracies that were logged cannot be judged: {error}",
            subject=Subject(),
            evidence=(Evidence(f"user/{TRAIN}"), Evidence(f"user/{TEST}")),
            fix="Log shares of samples between 0 and 1.",
            refuted_if="the values are shares, and the store damaged them.",
        )
        return
    yield Finding(
        severity=Severity.WARNING if found.verdict in _DOUBTED else Severity.INFO,
        title=_named(found),
        detail=f"{_named(found)}: {found.claim}",
        subject=Subject(step=_step(found), verdict=found.verdict.value),
        evidence=tuple(_evidence(run, found)),
        fix=_NEXT[found.verdict],
        refuted_if=_REFUTED[found.verdict],
    )


def _named(found: Detection) -> str:
    name = "grokking, strong" if found.strong else found.verdict.value
    return name[0].upper() + name[1:]


def _step(found: Detection) -> int | None:
    last = found.generalised or found.memorised
    return last.by if last else None


def _evidence(run: Run, found: Detection) -> Iterator[Evidence]:
    for name, interval in ((TRAIN, found.memorised), (TEST, found.memorised), (TEST, found.generalised)):
        if interval is not None:
            yield from _at(run, name, interval)
    if found.memorised is None:
        yield Evidence(f"user/{TRAIN}", found.last_step, f"{found.logs[0]} logs")
    if found.plateau is not None:
        yield Evidence(f"user/{TEST}/plateau", None, found.plateau)


def _at(run: Run, name: str, interval: Interval) -> Iterator[Evidence]:
    scalar = run.scalar(name, source="user")
    for step in (interval.after, interval.by):
        for value in scalar.values[scalar.steps == step][:1]:
            yield Evidence(f"user/{name}", step, "NaN" if math.isnan(value) else float(value))
