"""A case against its control: whether the factor had an effect, and what follows from the two verdicts."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.evaluation import Evaluation
from backlight.diagnose.matrix.observation import Observation, open_case_run
from backlight.diagnose.matrix.plan import UNDECIDED
from backlight.records import DiagnosisKind, to_json
from backlight.store.read.run import Run

COMPARED_STEPS = 5
MAX_DIFFERENCES = 4
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")


class Effect(enum.StrEnum):
    """Whether the factor changed anything besides the verdict."""

    OBSERVED = "observed"
    POSSIBLE = "possible"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case that has run, with its evaluation; ``attempt`` is relative to the directory of the matrix."""

    case: Case
    attempt: str
    observation: Observation
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case and its control. ``outcome`` is an answer of the plan's tree; empty if undecided."""

    case: str
    control: str
    factor: str
    effect: Effect
    differences: tuple[str, ...]
    compared: tuple[str, ...]
    outcome: str
    claim: str
    why: str = ""


Differences = tuple[Effect, list[str], list[str]]
"""Effect, what differs, and what was compared."""


def compare(one: CaseResult, control: CaseResult, root: Path) -> Comparison:
    """Compare a case with its control; a factor without an observed effect is not cleared."""
    effect, differences, compared = _effect(one, control, root)
    verdict, before, factor = one.evaluation.verdict, control.evaluation.verdict, one.case.factor
    outcome = why = ""
    if verdict in UNDECIDED:
        why = f"the verdict of the case is {verdict}"
    elif before in UNDECIDED:
        why = f"the verdict of the control is {before}"
    elif effect is Effect.NONE:
        why = f"the factor had no effect that shows in {', '.join(compared)}"
    elif verdict is not before:
        passing = {before: "causes", verdict: "cures"}
        outcome = passing.get(DiagnosisKind.PASS, "changes")
    elif effect is Effect.OBSERVED:
        outcome = "none"
    else:
        why = "no evidence that the factor changed anything; add shows = 'regular expression'"
    words = f"{outcome} it" if outcome else f"undecided: {why}"
    words = "makes no difference to the verdict" if outcome == "none" else words
    claim = f"{factor} {words} ({before} -> {verdict})"
    names = one.case.name, control.case.name, factor
    return Comparison(*names, effect, tuple(differences), tuple(compared), outcome, claim, why)


def _effect(one: CaseResult, control: CaseResult, root: Path) -> Differences:
    case, before = one.case, control.case
    moved = {n for n, value in case.environment.items() if value != before.environment.get(n)}
    for name in sorted(moved | set(case.unset) ^ set(before.unset)):
        if one.observation.arrived.get(name) is False:
            lost = f"environment {name}, which did not reach the process that does the work"
            return Effect.NONE, [], [lost]
    paths = root / one.attempt, root / control.attempt
    texts = ["\n".join(_text(path / name) for name in ("stdout.txt", "stderr.txt")) for path in paths]
    found: list[tuple[bool, str]] = []
    compared: list[str] = []
    for pattern in set(case.shows) - set(before.shows):
        here, there = (re.search(pattern, each, re.MULTILINE) for each in texts)
        if here is None:
            return Effect.NONE, [], [f"its output, which lacks {pattern!r}"]
        compared.append(f"{pattern!r} in the outputs")
        found += [] if there else [(True, f"output shows {here[0]!r}, its control's does not")]
    finished = one.evaluation.verdict is control.evaluation.verdict is DiagnosisKind.PASS
    runs = [run for path in paths if (run := open_case_run(path / "run")) is not None]
    if len(runs) == 2:
        found += _run_differences(*runs)
        compared.append("the fingerprints and first steps of the runs")
    if all(text.strip() for text in texts):
        found += _output_differences(_lines(paths[0]), _lines(paths[1]), whole=finished)
        compared.append("the outputs")
    if certain := [difference for sure, difference in found if sure]:
        return Effect.OBSERVED, certain[:MAX_DIFFERENCES], compared
    if found:
        notes = [f"{each} (chance, if training is not seeded)" for _, each in found[:MAX_DIFFERENCES]]
        return Effect.POSSIBLE, notes, compared
    # What a case that was cut short did not reach may still differ.
    return Effect.NONE if compared and finished else Effect.UNKNOWN, [], compared


def _run_differences(run: Run, control: Run) -> Iterator[tuple[bool, str]]:
    """Return what differs for certain (True), and what may differ by chance, between two runs."""
    fingerprints = run.fingerprint(), control.fingerprint()
    if fingerprints[0] and fingerprints[1]:
        here, there = (to_json(fingerprint) for fingerprint in fingerprints)
        # Requested settings and the host are no effect; the module hash repeats the module table.
        for key in here.keys() - {"script", "arguments", "host", "module_hash"}:
            if here[key] != there[key]:
                yield True, f"fingerprint {key}: {_change(there[key], here[key])}"
    first, second = (
        [(p.name, p.shape, p.dtype, p.device, p.requires_grad) for p in r.parameters()]
        for r in (run, control)
    )
    if first and second and first != second:
        yield True, "the table of parameters"
    names = set(run.scalar_names("backlight")) & set(control.scalar_names("backlight"))
    for name in sorted(n for n in names if n.split("/")[0] not in {"cost", "time", "phase"}):
        now, before = (
            dict(zip(v.steps[:COMPARED_STEPS], v.values[:COMPARED_STEPS], strict=True))
            for v in (run.scalar(name), control.scalar(name))
        )
        for step in sorted(now.keys() & before.keys()):
            if not np.array_equal(now[step], before[step], equal_nan=True):
                sure = step == 0 and (name == "backwards" or name.startswith("lr/"))
                yield sure, f"{name} at step {step}: {before[step]:.6g} and {now[step]:.6g}"
                break


def _change(before: object, after: object) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(key for key in after.keys() | before.keys() if before.get(key) != after.get(key))
        return ", ".join(f"{key} {before.get(key, 'none')} and {after.get(key, 'none')}" for key in keys)
    if isinstance(before, Sequence) and isinstance(after, Sequence) and not isinstance(before, str):
        return f"{len(before)} and {len(after)} entries"
    return f"{before} and {after}"


def _output_differences(lines: list[str], others: list[str], *, whole: bool) -> Iterator[tuple[bool, str]]:
    """Compare the outputs line by line: words differ for certain, numbers may differ by chance."""
    pairs = zip_longest(lines, others, fillvalue="") if whole else zip(lines, others, strict=False)
    for here, there in pairs:
        if here != there:
            sure = _NUMBER.sub("#", here) != _NUMBER.sub("#", there)
            yield sure, f"output {here.strip()[:80]!r} where its control has {there.strip()[:80]!r}"


def _lines(attempt: Path) -> list[str]:
    text = _text(attempt / "stdout.txt")
    complete = text[: text.rfind("\n") + 1]  # the last line of a case that was ended may be cut
    # Paths of the attempt and addresses always differ.
    return re.sub(r"0x[0-9a-fA-F]+", "0x", complete.replace(str(attempt), "{case}")).splitlines()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
