"""Comparison of stored runs: configurations, series side by side, step times, findings. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backlight.analysis.fingerprint_diff import (
    LETTERS,
    FingerprintDifference,
    Role,
    assign_roles,
    differences,
    normalize,
)
from backlight.analysis.side_by_side import (
    MatchedRow,
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
from backlight.monitors.steptime.model.evidence import StoredProfile, read_profile
from backlight.monitors.steptime.model.step_comparison import (
    TimeComparison,
    TimeRow,
    compare_series,
    compare_times,
    levels_of,
    lost_share,
    medians,
    widen,
)
from backlight.monitors.steptime.model.step_times import ASSUMED, CONFIDENCE, MIN_STEPS, Floats, difference
from backlight.records import Finding, Fingerprint, Severity
from backlight.report.verdict import lacking, sampled_text
from backlight.store.errors import RunFormatError
from backlight.store.format.names import MANIFEST
from backlight.store.read.run import Run, open_run
from backlight.text import listed

NEGLIGIBLE = 0.005
"""Share of all operations below which a kind is not tested."""


def compare_kinds(first: Run, second: Run, confidence: float = CONFIDENCE) -> TimeComparison | None:
    """Compare two profiles by kind of operation; None where one of the runs has no traced profile."""
    profiles = read_profile(first), read_profile(second)
    if profiles[0] is None or profiles[1] is None:
        return None
    averages = _averages(profiles[0]), _averages(profiles[1])
    if not averages[0] or not averages[1]:
        return None
    first_steps, second_steps = (int(p.content.get("traced_steps") or 0) for p in profiles if p)
    counts = (first_steps, second_steps)
    names = dict.fromkeys([*averages[0], *averages[1]])
    rows = [TimeRow(name, averages[0].get(name, 0.0), averages[1].get(name, 0.0)) for name in names]
    if min(counts) < MIN_STEPS:
        needed = f"{MIN_STEPS} or more are needed (backlight profile --traced)"
        why = f"no intervals: {min(counts)} traced steps, {needed}"
        return TimeComparison(counts, tuple(rows), confidence, (why,))
    left, other = _by_step(first, counts[0]), _by_step(second, counts[1])
    if left is None or other is None:
        why = "no intervals: a trace is not there, or cannot be read (pip install 'backlight[trace]')"
        return TimeComparison(counts, tuple(rows), confidence, (why,))
    least = [NEGLIGIBLE * sum(float(np.median(series)) for series in side.values()) for side in (left, other)]
    levels = levels_of((left, other), least)
    waits = lost_share(first), lost_share(second)
    shown = (
        widen(
            compare_series(row.name, left, other, difference, levels[row.name], ASSUMED),
            *waits,
            is_drifting=False,
        )
        if row.name in levels
        else row
        for row in rows
    )
    return TimeComparison(counts, tuple(shown), confidence, variation=ASSUMED)


def _averages(profiled: StoredProfile) -> dict[str, float]:
    """Return milliseconds per step by kind: of the device where there is one, else of the host."""
    rows = profiled.rows("kinds")
    column = "device_ms" if any(row.get("device_ms") for row in rows) else "host_ms"
    return {str(row["name"]): float(row.get(column) or 0.0) for row in rows}


def _by_step(run: Run, steps: int) -> dict[str, Floats] | None:
    """Return seconds by kind, each [steps], from the trace that a run keeps; None where that fails."""
    paths = [path for path in run.evidence() if path.endswith("trace.json.gz")]
    if not paths:
        return None
    try:
        # Reading traces takes packages that reading runs does not.
        from backlight.trace.analysis import analyse_rank  # noqa: PLC0415
        from backlight.trace.reader import read_trace  # noqa: PLC0415
        from backlight.trace.step_operators import split  # noqa: PLC0415
        from backlight.trace.timeline import Timeline  # noqa: PLC0415

        main, _ = split(read_trace(run.path / paths[-1]), steps)
        timeline = Timeline(main)
        numbers = list(dict.fromkeys(step.number for step in timeline.steps if step.number is not None))
        each = [analyse_rank(timeline, number) for number in numbers]
    except (ModuleNotFoundError, ValueError, OSError):
        return None
    on_device = any(analysis.device_total for analysis in each)
    names = dict.fromkeys(row.name for analysis in each for row in analysis.kinds)
    by_name = [
        {row.name: (row.device if on_device else row.host) * 1e-9 for row in rank.kinds} for rank in each
    ]
    return {name: np.array([row.get(name, 0.0) for row in by_name]) for name in names}


MAX_REPEATS = 32
"""Runs of a directory that are looked at, the newest first."""

SEEDS = frozenset({"seed", "random_seed", "manual_seed", "data_seed", "rng_seed"})
"""Arguments that are assumed to set a seed: runs that differ in them alone are repeats."""


def groups_of_repeats(a: Run, b: Run) -> list[list[Mapping[str, float]]]:
    """Return the medians by phase of the repeats of two runs, which belong to their groups.

    Where both runs are equal their own difference is the question: it is left out.
    """
    first_print, other = a.fingerprint(), b.fingerprint()
    if first_print is None or other is None:
        return []
    compared = {a.path.resolve(), b.path.resolve()}
    if _is_equal(first_print, other) and a.monitors == b.monitors:
        return [list(_repeats(a, first_print, compared))]
    return [
        list(_repeats(run, fingerprint, compared - {run.path.resolve()}))
        for run, fingerprint in ((a, first_print), (b, other))
    ]


def _repeats(run: Run, fingerprint: Fingerprint, without: set[Path]) -> Iterator[dict[str, float]]:
    """Yield the attempts of the run and of its neighbours that have its fingerprint and its monitors."""
    for path in [run.path.resolve(), *_neighbours(run.path.resolve())]:
        if path in without:
            continue
        try:
            other = open_run(path)
        except (RunFormatError, OSError):
            continue
        for attempt in other.attempts if other.monitors == run.monitors else ():
            stored = other.fingerprint(attempt.index)
            if stored is not None and _is_equal(fingerprint, stored):
                by_phase = medians(other, attempt.index)
                if by_phase is not None:
                    yield by_phase


def _neighbours(path: Path) -> list[Path]:
    try:
        neighbours = [p for p in path.parent.iterdir() if p != path and (p / MANIFEST).is_file()]
        return sorted(neighbours, key=lambda p: -(p / MANIFEST).stat().st_mtime)[:MAX_REPEATS]
    except OSError:
        return []


def _is_equal(a: Fingerprint, b: Fingerprint) -> bool:
    """Return whether two fingerprints agree on one machine, seeds and output paths aside."""
    return all(
        (d.role is Role.NOTE and d.field not in {"host", "versions.backlight"})
        or (d.field.startswith("arguments.") and normalize(d.field.partition(".")[2]) in SEEDS)
        for d in assign_roles(differences((a, b)), None)
    )


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
class ComparedFinding:
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
    differences: tuple[FingerprintDifference, ...]
    notes: tuple[str, ...]
    steps: tuple[int, int] | None
    rows: tuple[MatchedRow, ...]
    parameters: tuple[MatchedRow, ...]
    times: tuple[TimeComparison, ...]
    kinds: TimeComparison | None
    findings: tuple[ComparedFinding, ...]


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
    diffs = assign_roles(_differences(runs), factor)
    if strict:
        _check(runs, diffs, factor)
    steps = last_part(runs)
    times = tuple(
        compare_times(runs[0], run, groups_of_repeats(runs[0], run), names=("A", letter))
        for letter, run in zip(LETTERS[1:], runs[1:], strict=False)
    )
    return Comparison(
        tuple(_side(letter, run) for letter, run in zip(LETTERS, runs, strict=False)),
        _headline(runs, diffs),
        tuple(diffs),
        tuple(_notes(runs, diffs, times)),
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


def _differences(runs: Sequence[Run]) -> list[FingerprintDifference]:
    prints = [each for run in runs if (each := run.fingerprint()) is not None]
    diffs = []
    if len(prints) == len(runs):
        diffs = differences(prints, [{p.name: p.shape for p in run.parameters()} for run in runs])
    diffs += _rates(runs)
    monitors = tuple(", ".join(run.monitors) or "none" for run in runs)
    if len(set(monitors)) > 1:
        diffs.append(FingerprintDifference("monitors", "monitors", monitors, Role.NOTE))
    return diffs


def _rates(runs: Sequence[Run]) -> Iterator[FingerprintDifference]:
    """Yield differences of recorded learning rates, which a script may change without an argument."""
    for name, label in learning_rates(runs).items():
        steps, values = common_steps([read_scalar(run, name) for run in runs])
        differing = np.flatnonzero(~np.isclose(values, values[:1], rtol=1e-6, atol=0.0).all(axis=0))
        if len(differing):
            first = int(differing[0])
            shown = tuple(f"{value:g}" for value in values[:, first])
            at = f"differs from step {steps[first]} on" if steps[first] else ""
            yield FingerprintDifference(f"lr.{name}", label, shown, remark=at)


def _check(runs: Sequence[Run], diffs: Sequence[FingerprintDifference], factor: str | None) -> None:
    """Raise where a strict comparison refuses the runs."""
    unknown = [run.location for run in runs if run.fingerprint() is None]
    if unknown:
        raise ComparabilityError(
            f"{', '.join(unknown)}: no fingerprint, so that --strict cannot compare; leave --strict out"
        )
    obstacles = [d.text for d in diffs if d.role is Role.OBSTACLE]
    if obstacles:
        paths = " and ".join(run.location for run in runs)
        raise ComparabilityError(
            f"{paths} are not comparable: {'; '.join(obstacles)}. Leave --strict out, or name what may "
            "differ, as --factor lr"
        )
    if factor is not None and not any(d.role is Role.FACTOR for d in diffs):
        raise ComparabilityError(f"--factor {factor}: it is the same in all runs, or none of them has it")


def _headline(runs: Sequence[Run], diffs: Sequence[FingerprintDifference]) -> str:
    if any(run.fingerprint() is None for run in runs):
        return "Whether the configurations agree is not known."
    parameters = [{(p.name, p.shape) for p in run.parameters()} for run in runs]
    scripts = any(d.field == "script" for d in diffs)
    if scripts and not set.intersection(*parameters):
        return "Unrelated training runs: their scripts differ, and they have no parameter in common."
    names = [d.name for d in diffs if d.role is not Role.NOTE]
    if not names:
        return "The recorded configurations agree."
    return f"The configurations differ in {listed(names, 4)}."


def _notes(
    runs: Sequence[Run], diffs: Sequence[FingerprintDifference], times: Sequence[TimeComparison]
) -> Iterator[str]:
    for letter, run in zip(LETTERS, runs, strict=False):
        if lacks := lacking(run):
            yield f"{letter} is {lacks[0].lower()}{lacks[1:]}."
        if run.fingerprint() is None:
            yield f"{letter} has no fingerprint: it took no step."
        if len(run.attempts) > 1:
            yield f"{letter} has {len(run.attempts)} attempts; fingerprint and step times are of the last."
    for differing in diffs:
        if differing.field.startswith("lr.") and differing.remark:
            yield f"{differing.name[:1].upper()}{differing.name[1:]} {differing.remark}."
        elif differing.remark:
            yield f"{differing.name}: {differing.remark}."
    yield from _first_differences(runs, [d for d in diffs if d.role is not Role.NOTE])
    yield from _work(diffs, times)


def _first_differences(runs: Sequence[Run], diffs: Sequence[FingerprintDifference]) -> Iterator[str]:
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
                "" if diffs else "; no recorded difference explains it (seed, data, other code, determinism)"
            )
            yield f"Loss differs from step {steps[differing[0]]} on{where}{why}."
    if identical:
        changed = [d.name for d in diffs if d.field.startswith(("arguments", "flags", "optimizers"))]
        do = "does" if len(changed) == 1 else "do"
        why = f": {' and '.join(changed)} {do} not change them" if changed else ""
        verb = "is" if len(identical) == 1 else "are"
        yield f"{' and '.join(identical).capitalize()} {verb} identical at all {amount} common steps{why}."


def _work(diffs: Sequence[FingerprintDifference], times: Sequence[TimeComparison]) -> Iterator[str]:
    """Yield what a difference of step times may rest on besides speed."""
    if not any(each.rows for each in times):
        return
    other = [
        d.name
        for d in diffs
        if d.field in {"modules", "parameter_count", "world_size"}
        or (d.field.startswith("arguments.") and any(part in d.field.lower() for part in BATCH_ARGUMENTS))
    ]
    if other:
        yield f"A step is not the same work in all runs ({', '.join(other)})."
    machines = [d.name for d in diffs if d.field in {"host", "device"}]
    if machines:
        yield f"The step times are of different machines ({', '.join(machines)})."


def _findings(runs: Sequence[Run]) -> Iterator[ComparedFinding]:
    """Yield each finding that is no hint, in order; one of a rule and subject in several runs once."""
    by_subject: dict[tuple[str, str, str], tuple[Finding, list[str]]] = {}
    for letter, run in zip(LETTERS, runs, strict=False):
        for finding in findings_of(run):
            key = (finding.rule, finding.subject.parameter or "", finding.subject.module or "")
            letters = by_subject.setdefault(key, (finding, []))[1]
            if letter not in letters:
                letters.append(letter)
    letters_of = {id(finding): letters for finding, letters in by_subject.values()}
    for finding in separate_hints(finding for finding, _ in by_subject.values())[0]:
        present = letters_of[id(finding)]
        unknown = [
            letter
            for letter, run in zip(LETTERS, runs, strict=False)
            if run.monitors and finding.monitor not in run.monitors and letter not in present
        ]
        yield ComparedFinding(finding.severity, finding.rule, finding.title, tuple(present), tuple(unknown))
