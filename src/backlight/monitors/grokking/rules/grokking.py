"""Rule ``grokking``: the verdict on a run that logged both accuracies, with its two times."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backlight.monitors.grokking.model.curves import DetectionError, Interval
from backlight.monitors.grokking.model.reader import TEST, TRAIN, detect_run, has_accuracies
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict, VerdictLimits
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

_WARNINGS = {
    GrokkingVerdict.UNSTABLE,
    GrokkingVerdict.THRESHOLD_ARTEFACT,
    GrokkingVerdict.INSUFFICIENT_DATA,
}
"""Verdicts that need another look; the others are for information."""

_TITLE = {
    GrokkingVerdict.GROKKING: "The run groks: it generalises long after it memorised",
    GrokkingVerdict.NO_DELAY: "No grokking: the run generalised about when it memorised",
    GrokkingVerdict.MEMORISED: "The run memorised and did not generalise",
    GrokkingVerdict.NOT_FITTED: "The run did not fit its training data",
    GrokkingVerdict.UNSTABLE: "No verdict on grokking: the accuracies are unstable",
    GrokkingVerdict.THRESHOLD_ARTEFACT: "Grokking at some accuracy thresholds only: a threshold artefact",
    GrokkingVerdict.INSUFFICIENT_DATA: "No verdict on grokking: the logged accuracies are insufficient",
    GrokkingVerdict.CENSORED: "No verdict on grokking yet: the run ended too early",
}

_FIX = {
    GrokkingVerdict.GROKKING: (
        "Run the matched control (`--control random-labels`) and compare: only measures that the control "
        "does not follow can signal generalisation."
    ),
    GrokkingVerdict.NO_DELAY: "For a delay, use a smaller training share or a larger initialisation.",
    GrokkingVerdict.MEMORISED: "Run longer or with more weight decay before concluding that it never will.",
    GrokkingVerdict.NOT_FITTED: "Check the training loss; try a larger learning rate or more steps.",
    GrokkingVerdict.UNSTABLE: "Plot both accuracies and compare with a lower learning rate.",
    GrokkingVerdict.THRESHOLD_ARTEFACT: "Print the sweep of thresholds with `backlight grok detect RUN`.",
    GrokkingVerdict.INSUFFICIENT_DATA: "Log both accuracies more often, and only measured values.",
    GrokkingVerdict.CENSORED: "Continue with `--resume`, at least to five times the time to memorise.",
}

_REFUTED_IF = {
    GrokkingVerdict.GROKKING: (
        "logs between the two show a test accuracy that rose with the training accuracy, or the run with "
        "another order of test samples gives other times."
    ),
    GrokkingVerdict.NO_DELAY: "denser logs show a delay that these hide.",
    GrokkingVerdict.MEMORISED: "the same run, continued, generalises.",
    GrokkingVerdict.NOT_FITTED: "the training accuracy was measured on samples that were not trained on.",
    GrokkingVerdict.UNSTABLE: "the dips come from the evaluation (dropout left on), not from the net.",
    GrokkingVerdict.THRESHOLD_ARTEFACT: "a longer run keeps the verdict at every point of the sweep.",
    GrokkingVerdict.INSUFFICIENT_DATA: "more logs, or a larger test set, allow another verdict.",
    GrokkingVerdict.CENSORED: "the same run, continued, stays as it is.",
}


@rule("grokking", monitor="grokking", limits=VerdictLimits)
def grokking(run: Run, limits: VerdictLimits) -> Iterator[Finding]:
    """Report the verdict of a run that logged both accuracies; silent if it did not."""
    if not has_accuracies(run):
        return
    try:
        found = detect_run(run, limits)
    except DetectionError as error:
        yield Finding(
            severity=Severity.WARNING,
            title="The logged accuracies cannot be evaluated",
            detail=f"{error}.",
            subject=Subject(),
            evidence=(Evidence(f"user/{TRAIN}"), Evidence(f"user/{TEST}")),
            fix="Log shares of samples between 0 and 1.",
            refuted_if="the values are shares, and the store damaged them.",
        )
        return
    yield Finding(
        severity=Severity.WARNING if found.verdict in _WARNINGS else Severity.INFO,
        title=_TITLE[found.verdict],
        detail=found.claim,
        subject=Subject(step=_step(found), verdict=found.verdict.value),
        evidence=tuple(_evidence(run, found)),
        fix=_FIX[found.verdict],
        refuted_if=_REFUTED_IF[found.verdict],
    )


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
