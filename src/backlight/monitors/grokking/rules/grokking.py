"""Rule ``grokking``: the verdict on a run that logged both accuracies, with its two times."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backlight.monitors.grokking.model.curves import DetectionError
from backlight.monitors.grokking.model.reader import TEST, TRAIN, detect_run, has_accuracies
from backlight.monitors.grokking.model.verdicts import Detection, GrokkingVerdict, VerdictLimits
from backlight.records import Evidence, Finding, FindingKind, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

_Verdict = GrokkingVerdict

_WARNINGS = {_Verdict.UNSTABLE, _Verdict.THRESHOLD_ARTEFACT, _Verdict.INSUFFICIENT_DATA}
"""Verdicts that need another look; the others are for information."""

_WORDS = {
    _Verdict.GROKKING: (
        "The run groks: it generalises long after it memorised",
        "Run matched controls (`--seeds 0-6 --control random-labels`) and compare: only measures that the "
        "controls do not follow can signal generalisation.",
        "logs between the two show a test accuracy that rose with the training accuracy, or the run with "
        "another order of test samples gives other times.",
    ),
    _Verdict.NO_DELAY: (
        "No grokking: the run generalised about when it memorised",
        "For a delay, use a smaller training share or a larger initialisation.",
        "denser logs show a delay that these hide.",
    ),
    _Verdict.MEMORISED: (
        "The run memorised and did not generalise",
        "Run longer or with more weight decay before concluding that it never will.",
        "the same run, continued, generalises.",
    ),
    _Verdict.NOT_FITTED: (
        "The run did not fit its training data",
        "Check the training loss; try a larger learning rate or more steps.",
        "the training accuracy was measured on samples that were not trained on.",
    ),
    _Verdict.UNSTABLE: (
        "No verdict on grokking: the accuracies are unstable",
        "Plot both accuracies and compare with a lower learning rate.",
        "the dips come from the evaluation (dropout left on), not from the net.",
    ),
    _Verdict.THRESHOLD_ARTEFACT: (
        "Grokking at some accuracy thresholds only: a threshold artefact",
        "Print the sweep of thresholds with `backlight grok detect RUN`.",
        "a longer run keeps the verdict at every point of the sweep.",
    ),
    _Verdict.INSUFFICIENT_DATA: (
        "No verdict on grokking: the logged accuracies are insufficient",
        "Log both accuracies more often, and only measured values.",
        "more logs, or a larger test set, allow another verdict.",
    ),
    _Verdict.CENSORED: (
        "No verdict on grokking yet: the run ended too early",
        "Continue with `--resume`, at least to five times the time to memorise.",
        "the same run, continued, stays as it is.",
    ),
}
"""Title, fix and what refutes it."""


@rule("grokking", monitor="grokking", limits=VerdictLimits, is_statistic=True)
def grokking(run: Run, limits: VerdictLimits) -> Iterator[Finding]:
    """Report the verdict of a run that logged both accuracies; silent if it did not."""
    if not has_accuracies(run):
        return
    try:
        detection = detect_run(run, limits)
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
    title, fix, refuted_if = _WORDS[detection.verdict]
    last = detection.generalised or detection.memorised
    yield Finding(
        severity=Severity.WARNING if detection.verdict in _WARNINGS else Severity.INFO,
        title=title,
        detail=detection.claim,
        subject=Subject(step=last.by if last else None, verdict=detection.verdict.value),
        evidence=tuple(_evidence(run, detection)),
        fix=fix,
        refuted_if=refuted_if,
        kind=FindingKind.STATISTIC,  # the result of the run, whatever its severity
    )


def _evidence(run: Run, d: Detection) -> Iterator[Evidence]:
    for name, interval in ((TRAIN, d.memorised), (TEST, d.memorised), (TEST, d.generalised)):
        if interval is None:
            continue
        scalar = run.scalar(name, source="user")
        for step in (interval.after, interval.by):
            for value in scalar.values[scalar.steps == step][:1]:
                yield Evidence(f"user/{name}", step, "NaN" if math.isnan(value) else float(value))
    if d.memorised is None:
        yield Evidence(f"user/{TRAIN}", d.last_step, f"{d.logs[0]} logs")
    if d.plateau is not None:
        yield Evidence(f"user/{TEST}/plateau", None, d.plateau)
