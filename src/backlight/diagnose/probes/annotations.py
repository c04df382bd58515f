"""Probes and hints of a script as annotations of a continuous integration."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backlight.diagnose.probes.hints import HintOutcome, HintResult
from backlight.diagnose.probes.observer import ProbeObserver
from backlight.diagnose.probes.result import ProbeOutcome
from backlight.records import Severity
from backlight.report.annotations import Annotations, Claim, location
from backlight.text import count

GROUP = "check"


def probe_annotations(
    observer: ProbeObserver,
    script: str,
    hints: Sequence[HintResult],
    failing: Collection[str],
    watched: Annotations | None = None,
    contradicted: Sequence[str] = (),
) -> Annotations:
    """Return the annotations of ``check``: one case per probe, then those of the ``watched`` steps.

    ``contradicted`` are facts of good runs that do not hold. A hint that the run has confirmed is among the
    findings of the steps, with its line.
    """
    line = observer.line
    place = location(script, None) if line is None else location(line.path, line.number)
    claims = [
        Claim(
            name=result.probe.value, group=GROUP,
            title=f"the probe {result.probe.value} {result.outcome.value}",
            severity=Severity.ERROR if result.fails else Severity.INFO,
            text=result.text, place=place, identity=result.probe.value, accepted=result.accepted,
            is_failure=result.fails and result.probe in failing,
        )
        for result in observer.results
        if result.outcome in {ProbeOutcome.FAILED, ProbeOutcome.UNDECIDED}
    ]  # fmt: skip
    claims += [
        Claim(
            name=each.hint.name, group=GROUP, title=f"hint, not confirmed: {each.hint.title}",
            severity=Severity.INFO, text=f"fix: {each.hint.fix}", is_failure=False,
            place=location(each.hint.path, each.hint.line),
            identity=f"{each.hint.name}/{each.hint.source.strip()}",
        )
        for each in hints
        if each.is_shown and each.outcome is HintOutcome.NOT_CONFIRMED
    ]  # fmt: skip
    claims += [
        Claim(
            name="against", group=GROUP, title=f"contradicts the good run: {text.partition(':')[0]}",
            severity=Severity.ERROR, text=text, is_failure=True, place=place, identity=text.partition(":")[0],
        )
        for text in contradicted
    ]  # fmt: skip
    skipped = {r.probe.value: r.text for r in observer.results if r.outcome is ProbeOutcome.NOT_PROBED}
    cases = {r.probe.value: (GROUP, skipped.get(r.probe.value, "")) for r in observer.results}
    failed = sum(claim.is_failure and claim.name in cases for claim in claims)
    verdict = f"{count(len(observer.results), 'probe')}, {failed:,} failed"
    if contradicted:
        verdict += f", {count(len(contradicted), 'fact')} of good runs contradicted"
    notes = [*observer.notes, *(f"not probed: {name}: {reason}" for name, reason in skipped.items())]
    if watched is None:
        return Annotations(
            title=script, verdict=verdict, place=place, claims=claims, cases=cases, notes=notes
        )
    return Annotations(
        title=script, verdict=f"{verdict}. {watched.verdict}", place=place, claims=[*claims, *watched.claims],
        cases={**cases, **watched.cases}, notes=[*notes, *watched.notes], lacks=watched.lacks,
    )  # fmt: skip
