"""A case against its control: whether the one knob moved anything, and the outcome with it.

A factor is only cleared of suspicion by a knob that really moved: where both cases end alike, an
effect must have been seen elsewhere (the run's fingerprint, the output, what the plan says it shows).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from backlight.diagnose.matrix import case_run
from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.directory import Attempt
from backlight.diagnose.matrix.evaluation import Judgement
from backlight.diagnose.matrix.observations import Observation
from backlight.diagnose.matrix.plan import UNDECIDED
from backlight.records import DiagnosisKind

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_MOST_SHOWN = 4


class Effect(enum.StrEnum):
    """Whether a knob moved anything besides the verdict."""

    SEEN = "seen"
    PERHAPS = "perhaps"
    NONE = "none"
    NOT_OBSERVED = "not observed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case and its control. ``outcome`` is one of the plan's outcomes, empty where undecided.

    ``seen`` is what the knob moved, ``compared`` what was looked at; ``why`` says what an empty
    outcome lacks.
    """

    case: str
    control: str
    factor: str
    effect: Effect
    seen: tuple[str, ...]
    compared: tuple[str, ...]
    outcome: str
    claim: str
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """What is known of one finished case."""

    case: Case
    attempt: Attempt
    observation: Observation
    judgement: Judgement


def compare(one: Seen, control: Seen) -> Comparison:
    """Compare a case with its control."""
    effect, seen, compared = effect_of(one, control)
    outcome, why = _outcome(one.judgement.verdict, control.judgement.verdict, effect, compared)
    factor = one.case.factor
    change = f"{control.judgement.verdict.value} -> {one.judgement.verdict.value}"
    claims = {
        "causes": f"{factor} brings it about ({change})",
        "cures": f"{factor} removes it ({change})",
        "changes": f"{factor} changes it ({change})",
        "none": f"{factor} makes no difference to the verdict ({change})",
        "": f"{factor}: undecided ({change}): {why}",
    }
    return Comparison(
        one.case.name,
        control.case.name,
        factor,
        effect,
        tuple(seen),
        tuple(compared),
        outcome,
        claims[outcome],
        why,
    )


def _outcome(
    verdict: DiagnosisKind, before: DiagnosisKind, effect: Effect, compared: Sequence[str]
) -> tuple[str, str]:
    for name, which in (("the case", verdict), ("the control", before)):
        if which in UNDECIDED:
            return "", f"the verdict of {name} is {which.value}"
    if effect is Effect.NONE:
        return "", f"the knob had no effect that shows in {', '.join(compared)}"
    if verdict is before:
        if effect is Effect.SEEN:
            return "none", ""
        return (
            "",
            "nothing shows that the knob moved anything; say how it shows: shows = 'regular expression'",
        )
    if before is DiagnosisKind.PASS:
        return "causes", ""
    return ("cures" if verdict is DiagnosisKind.PASS else "changes"), ""


def effect_of(one: Seen, control: Seen) -> tuple[Effect, list[str], list[str]]:
    """Return whether the knob moved anything, what moved, and what was compared."""
    certain: list[str] = []
    perhaps: list[str] = []
    compared: list[str] = []
    given, before = one.case.launch, control.case.launch
    moved = {
        n for n in (*given.environment, *given.unset) if given.environment.get(n) != before.environment.get(n)
    }
    moved |= set(given.unset) ^ set(before.unset)
    dropped = [n for n in sorted(moved) if one.observation.arrived.get(f"environment {n}") is False]
    if dropped:
        return Effect.NONE, [], [f"environment {dropped[0]}, which did not arrive where the work is done"]
    mine, its = _text(one.attempt), _text(control.attempt)
    for pattern in one.case.shows:
        if pattern in control.case.shows:
            continue
        here, there = re.search(pattern, mine, re.MULTILINE), re.search(pattern, its, re.MULTILINE)
        if here is None:
            return Effect.NONE, [], [f"its output, which lacks {pattern!r}"]
        compared.append(f"{pattern!r} in the outputs")
        if there is None:
            certain.append(f"output shows {here[0]!r}, its control's does not")
    whole = one.judgement.verdict is DiagnosisKind.PASS and control.judgement.verdict is DiagnosisKind.PASS
    runs = case_run.read_run(one.attempt.run), case_run.read_run(control.attempt.run)
    if runs[0] is not None and runs[1] is not None:
        sure, maybe = case_run.differences(runs[0], runs[1])
        certain += sure
        perhaps += maybe
        compared.append("the fingerprints and first steps of the runs")
    if mine and its:
        sure, maybe = _output_differences(one.attempt, control.attempt, whole=whole)
        certain += sure
        perhaps += maybe
        compared.append("the outputs")
    if certain:
        return Effect.SEEN, certain[:_MOST_SHOWN], compared
    if perhaps:
        return (
            Effect.PERHAPS,
            [f"{p} (chance, where training is not seeded)" for p in perhaps[:_MOST_SHOWN]],
            compared,
        )
    # Of a case that was cut short, what it did not come to may still differ.
    if compared and whole:
        return Effect.NONE, [], compared
    return Effect.NOT_OBSERVED, [], compared


def _output_differences(one: Attempt, control: Attempt, *, whole: bool) -> tuple[list[str], list[str]]:
    """Compare what was printed line by line: words tell for certain, numbers may differ by chance."""
    mine, its = _lines(one), _lines(control)
    if not whole:
        shorter = min(len(mine), len(its))
        mine, its = mine[:shorter], its[:shorter]
    certain: list[str] = []
    perhaps: list[str] = []
    for here, there in zip_longest(mine, its, fillvalue=""):
        if here == there:
            continue
        if _NUMBER.sub("#", here) != _NUMBER.sub("#", there):
            certain.append(f"output {here.strip()[:80]!r} where its control has {there.strip()[:80]!r}")
        else:
            perhaps.append(f"output {here.strip()[:80]!r} where its control has {there.strip()[:80]!r}")
    return certain, perhaps


def _lines(attempt: Attempt) -> list[str]:
    """Return the standard output without what differs by place alone."""
    try:
        text = attempt.stdout.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    complete = text[: text.rfind("\n") + 1]  # a case that was ended may have half a line last
    return _ADDRESS.sub("0x", complete.replace(str(attempt.path), "{case}")).splitlines()


def _text(attempt: Attempt) -> str:
    parts: list[Path] = [attempt.stdout, attempt.stderr]
    return "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in parts if p.exists())
