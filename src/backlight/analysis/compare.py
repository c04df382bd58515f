"""Comparison of stored runs: configurations, series side by side, step times, findings. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight import codec
from backlight.analysis.fingerprint_diff import (
    LETTERS,
    Difference,
    Role,
    assign_roles,
    differences,
)
from backlight.analysis.op_times import compare_kinds
from backlight.analysis.repeats import groups_of_repeats
from backlight.analysis.side_by_side import (
    Row,
    common_steps,
    is_equal_at,
    last_part,
    learning_rates,
    parameter_rows,
    read_scalar,
    series_rows,
)
from backlight.findings.evaluate import findings_of, separate_hints
from backlight.findings.losses import losses_of
from backlight.monitors.steptime.model.step_comparison import TimeComparison, compare_times
from backlight.records import Finding, Severity
from backlight.report.verdict import lacking, sampled_text
from backlight.store.read.run import Run
from backlight.text import listed

MAX_RUNS = 8
"""Runs that are compared: as many as a chart can tell apart."""

BATCH_ARGUMENTS = ("batch", "seq", "context", "block_size", "accum")
"""Parts of arguments that are assumed to change how much a step computes."""


class ComparabilityError(ValueError):
    """Runs whose configurations differ, in a strict comparison."""


@dataclass(frozen=True)
class Side:
    """One of the runs: its letter, directory, state, number of steps, and duration in seconds if it ended.

    ``lacks`` is what is missing of a recording to its end, empty where nothing is; ``coverage`` counts the
    steps with gradients and with a loss, empty where all have both.
    """

    letter: str
    name: str
    path: str
    status: str
    attempts: int
    steps: int
    seconds: float | None
    lacks: str = ""
    coverage: str = ""


@dataclass(frozen=True)
class FindingRow:
    """A finding of some runs: ``present`` are their letters, ``unknown`` those that lacked its monitor."""

    severity: Severity
    rule: str
    title: str
    present: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; the first is A.

    ``steps`` are first and last of the steps over which the medians of ``rows`` and ``parameters`` are taken,
    None where the runs have none in common. ``times`` compares each run with A. ``kinds``, times by kind of
    operation, is None unless two runs have a traced profile.
    """

    runs: tuple[Side, ...]
    headline: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    steps: tuple[int, int] | None
    rows: tuple[Row, ...]
    parameters: tuple[Row, ...]
    times: tuple[TimeComparison, ...]
    kinds: TimeComparison | None
    findings: tuple[FindingRow, ...]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON types."""

    def row(each: Row) -> dict[str, Any]:
        return {**codec.plain(each), "texts": list(each.texts)}

    return {
        **codec.plain(comparison),
        "rows": [row(each) for each in comparison.rows],
        "parameters": [row(each) for each in comparison.parameters],
        "times": [each.as_json() for each in comparison.times],
        "kinds": None if comparison.kinds is None else comparison.kinds.as_json(),
    }


def compare(runs: Sequence[Run], *, strict: bool = False, factor: str | None = None) -> Comparison:
    """Compare two or more runs.

    With ``strict``, runs whose configurations differ in more than ``factor`` and its consequences are
    refused. ``factor`` is one argument or field: ``--lr``, ``lr``, ``device``, ``versions.torch``.

    Raises
    ------
    ComparabilityError
        If ``strict`` refuses the runs.
    ValueError
        If there are fewer than two runs, or too many.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"expected 2 to {MAX_RUNS} runs to compare, got {len(runs)}")
    found = assign_roles(_differences(runs), factor)
    if strict:
        _check(runs, found, factor)
    steps = last_part(runs)
    times = tuple(
        compare_times(runs[0], run, groups_of_repeats(runs[0], run), names=("A", letter))
        for letter, run in zip(LETTERS[1:], runs[1:], strict=False)
    )
    return Comparison(
        tuple(_side(letter, run) for letter, run in zip(LETTERS, runs, strict=False)),
        _headline(runs, found),
        tuple(found),
        tuple(_notes(runs, found, times)),
        steps,
        tuple(series_rows(runs, steps)),
        tuple(parameter_rows(runs, steps)),
        times,
        compare_kinds(runs[0], runs[1]) if len(runs) == 2 and times[0].rows else None,
        tuple(_findings(runs)),
    )


def _side(letter: str, run: Run) -> Side:
    spans = [a.ended - a.started for a in run.attempts if a.ended is not None and a.ended >= a.started]
    return Side(
        letter, run.name, run.location, run.status.value, len(run.attempts), run.last_step() + 1,
        sum(spans) if spans else None, run.shortfall, sampled_text(run),
    )  # fmt: skip


def _differences(runs: Sequence[Run]) -> list[Difference]:
    prints = [each for run in runs if (each := run.fingerprint()) is not None]
    found = []
    if len(prints) == len(runs):
        found = differences(prints, [{p.name: p.shape for p in run.parameters()} for run in runs])
    found += _rates(runs)
    monitors = tuple(", ".join(run.monitors) or "none" for run in runs)
    if len(set(monitors)) > 1:
        found.append(Difference("monitors", "monitors", monitors, Role.NOTE))
    return found


def _rates(runs: Sequence[Run]) -> Iterator[Difference]:
    """Yield differences of recorded learning rates, which a script may change without an argument."""
    for name, label in learning_rates(runs).items():
        steps, values = common_steps([read_scalar(run, name) for run in runs])
        differing = np.flatnonzero(~np.isclose(values, values[:1], rtol=1e-6, atol=0.0).all(axis=0))
        if len(differing):
            first = int(differing[0])
            shown = tuple(f"{value:g}" for value in values[:, first])
            at = f"differs from step {steps[first]} on" if steps[first] else ""
            yield Difference(f"lr.{name}", label, shown, remark=at)


def _check(runs: Sequence[Run], found: Sequence[Difference], factor: str | None) -> None:
    """Raise where a strict comparison refuses the runs."""
    unknown = [run.location for run in runs if run.fingerprint() is None]
    if unknown:
        raise ComparabilityError(
            f"{', '.join(unknown)}: no fingerprint, so that --strict cannot compare; leave --strict out"
        )
    obstacles = [d.text for d in found if d.role is Role.OBSTACLE]
    if obstacles:
        paths = " and ".join(run.location for run in runs)
        raise ComparabilityError(
            f"{paths} are not comparable: {'; '.join(obstacles)}. Leave --strict out, or name what may "
            "differ, as --factor lr"
        )
    if factor is not None and not any(d.role is Role.FACTOR for d in found):
        raise ComparabilityError(f"--factor {factor}: it is the same in all runs, or none of them has it")


def _headline(runs: Sequence[Run], found: Sequence[Difference]) -> str:
    if any(run.fingerprint() is None for run in runs):
        return "Whether the configurations agree is not known."
    parameters = [{(p.name, p.shape) for p in run.parameters()} for run in runs]
    scripts = any(d.field == "script" for d in found)
    if scripts and not set.intersection(*parameters):
        return "Unrelated training runs: their scripts differ, and they have no parameter in common."
    names = [d.name for d in found if d.role is not Role.NOTE]
    if not names:
        return "The recorded configurations agree."
    return f"The configurations differ in {listed(names, 4)}."


def _notes(
    runs: Sequence[Run], found: Sequence[Difference], times: Sequence[TimeComparison]
) -> Iterator[str]:
    for letter, run in zip(LETTERS, runs, strict=False):
        if lacks := lacking(run):
            yield f"{letter} is {lacks[0].lower()}{lacks[1:]}."
        if run.fingerprint() is None:
            yield f"{letter} has no fingerprint: it took no step."
        if len(run.attempts) > 1:
            yield f"{letter} has {len(run.attempts)} attempts; fingerprint and step times are of the last."
    for difference in found:
        if difference.field.startswith("lr.") and difference.remark:
            yield f"{difference.name[:1].upper()}{difference.name[1:]} {difference.remark}."
        elif difference.remark:
            yield f"{difference.name}: {difference.remark}."
    yield from _first_differences(runs, [d for d in found if d.role is not Role.NOTE])
    yield from _work(found, times)


def _first_differences(runs: Sequence[Run], found: Sequence[Difference]) -> Iterator[str]:
    """Yield from which step on loss and gradient norm differ, or that something had no effect on them."""
    identical, amount = [], 0
    for name, label in (("loss", "loss"), ("total_norm", "gradient norm")):
        if name == "loss" and len({tuple(losses_of(run)) for run in runs}) > 1:
            continue  # of other sums, or other networks
        steps, values = common_steps([read_scalar(run, name) for run in runs])
        differing = np.flatnonzero(~is_equal_at(values))
        if len(steps) and not len(differing):
            identical.append(label)
            amount = len(steps)
        elif len(differing) and name == "loss":
            where = "" if differing[0] else ", the first common one"
            why = (
                "" if found else "; no recorded difference explains it (seed, data, other code, determinism)"
            )
            yield f"Loss differs from step {steps[differing[0]]} on{where}{why}."
    if identical:
        changed = [d.name for d in found if d.field.startswith(("arguments", "flags", "optimizers"))]
        do = "does" if len(changed) == 1 else "do"
        why = f": {' and '.join(changed)} {do} not change them" if changed else ""
        verb = "is" if len(identical) == 1 else "are"
        yield f"{' and '.join(identical).capitalize()} {verb} identical at all {amount} common steps{why}."


def _work(found: Sequence[Difference], times: Sequence[TimeComparison]) -> Iterator[str]:
    """Yield what a difference of step times may rest on besides speed."""
    if not any(each.rows for each in times):
        return
    other = [
        d.name
        for d in found
        if d.field in {"modules", "parameter_count", "world_size"}
        or (d.field.startswith("arguments.") and any(part in d.field.lower() for part in BATCH_ARGUMENTS))
    ]
    if other:
        yield f"A step is not the same work in all runs ({', '.join(other)})."
    machines = [d.name for d in found if d.field in {"host", "device"}]
    if machines:
        yield f"The step times are of different machines ({', '.join(machines)})."


def _findings(runs: Sequence[Run]) -> Iterator[FindingRow]:
    """Yield each finding that is no hint, in order; one of a rule and subject in several runs once."""
    found: dict[tuple[str, str, str], tuple[Finding, list[str]]] = {}
    for letter, run in zip(LETTERS, runs, strict=False):
        for finding in findings_of(run):
            key = (finding.rule, finding.subject.parameter or "", finding.subject.module or "")
            letters = found.setdefault(key, (finding, []))[1]
            if letter not in letters:
                letters.append(letter)
    letters_of = {id(finding): letters for finding, letters in found.values()}
    for finding in separate_hints(finding for finding, _ in found.values())[0]:
        present = letters_of[id(finding)]
        unknown = [
            letter
            for letter, run in zip(LETTERS, runs, strict=False)
            if run.monitors and finding.monitor not in run.monitors and letter not in present
        ]
        yield FindingRow(finding.severity, finding.rule, finding.title, tuple(present), tuple(unknown))
