"""What differs between runs, in one line, and the facts behind it in at most ten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from backlight.analysis.compare import Comparison, FindingRow
from backlight.analysis.side_by_side import Row
from backlight.monitors.steptime.model.step_comparison import TimeComparison
from backlight.text import count, duration, listed, number

RUNS, SHOWN = 3, 3
"""Runs, and parts of another fact, that are listed."""


def verdict(comparison: Comparison) -> str:
    """Return final and best loss of each run in one line; without losses, what differs between the runs."""
    return loss_line(comparison) or comparison.headline


def loss_line(comparison: Comparison) -> str:
    """Return final and best loss of each run, by what the losses are called; empty where no run has one."""
    rows = {row.name: row for row in comparison.rows}
    return " ".join(_loss_line(comparison, rows, label) for label in _losses(comparison))


def _losses(comparison: Comparison) -> list[str]:
    """Return what the losses of the runs are called."""
    names = [row.name.partition("step of the best ") for row in comparison.rows]
    return [label for before, _, label in names if label and not before]


def _loss_line(comparison: Comparison, rows: Mapping[str, Row], label: str) -> str:
    final, best, steps = (rows[f"{which} {label}"] for which in ("final", "best", "step of the best"))
    if final.is_equal and best.is_equal:
        return f"Final {label}: {final.texts[0]} in all runs; best: {best.texts[0]}."
    bests = [f"{text} at step {step}" for text, step in zip(best.texts, steps.texts, strict=True)]
    return f"Final {label}: {_by_run(comparison, final)}; best: {_by_run(comparison, best, bests)}."


def _by_run(comparison: Comparison, row: Row, texts: Sequence[str] = ()) -> str:
    rows = zip(comparison.runs, row.values, texts or row.texts, strict=True)
    return listed([f"{side.letter} {text}" for side, value, text in rows if value is not None], RUNS)


def facts(comparison: Comparison) -> list[str]:
    """Return the lines behind the verdict: what differs first, step times last."""
    differing = [f"{d.name} {_slashed(d.values)}" for d in comparison.differences]
    lines = [*_runs(comparison)]
    lines += [] if verdict(comparison) == comparison.headline else [comparison.headline]
    lines += _listed("configuration", differing)
    lines += comparison.notes[:2]
    lines += _findings(comparison)
    tested = [times for times in comparison.times if times.rows]
    if len(comparison.times) == 1:
        lines += [*(times.verdict for times in tested), *times_facts(comparison.times[0])]
    elif tested:
        lines += [_times_line(tested)]
        lines += [f"{t.names[1]}÷A is {t.rows[0].text}: {t.rows[0].verdict}" for t in tested[: RUNS - 1]]
        lines += dict.fromkeys(times.variation_text for times in tested[:1])
    lines += _series("series", _other_rows(comparison))
    lines += _series("parameters that differ most", comparison.parameters)
    return lines


def _other_rows(comparison: Comparison) -> list[Row]:
    losses = tuple(f" {label}" for label in _losses(comparison))
    return [row for row in comparison.rows if not row.name.endswith(losses)]


def _times_line(tested: Sequence[TimeComparison]) -> str:
    firsts = [(times.names[1], times.rows[0]) for times in tested]
    decided = [f"{name} is {row.verdict}" for name, row in firsts if row.is_significant]
    rest = len(tested) - len(decided)
    undecided = [f"{count(rest, 'run')} undecided"] if rest else []
    return f"Step time against A: {listed([*decided, *undecided], RUNS)}."


def times_facts(times: TimeComparison, basis: str = "") -> list[str]:
    """Return what a comparison of step times rests on, and the phases that differ."""
    if not times.rows:
        return []
    phases = [f"{row.name.replace('_', ' ')} {row.text}" for row in times.rows[1:] if row.is_significant]
    step = times.rows[0]
    rates = (number(1e3 / ms) for ms in (step.first_ms, step.second_ms))
    rate = ", ".join(f"{name} {rate}" for name, rate in zip(times.names, rates, strict=True))
    which = f"; phases that differ: {listed(phases, SHOWN)}" if phases else "; no phase is known to differ"
    return [
        f"steps/s: {rate}{which}",
        *times.trouble[-1:],
        basis or times.basis,
    ]  # a busy machine explains drifts


def _runs(comparison: Comparison) -> Iterator[str]:
    for side in comparison.runs[:RUNS]:
        took = "" if side.seconds is None else f", took {duration(side.seconds)}"
        recorded = f"; {side.coverage}" if side.coverage else ""
        yield f"{side.letter} {side.path}: {side.status}, {count(side.steps, 'step')}{took}{recorded}"
    if len(comparison.runs) > RUNS:
        yield f"and {count(len(comparison.runs) - RUNS, 'more run')}"


def _series(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from _listed(title, [f"{row.name} {_slashed(row.texts)}" for row in rows if not row.is_equal])


def _listed(title: str, items: list[str]) -> Iterator[str]:
    if items:
        yield f"{title}: {listed(items, SHOWN)}"


def _slashed(values: tuple[str, ...]) -> str:
    return " / ".join(values[:RUNS])


def _findings(comparison: Comparison) -> Iterator[str]:
    partial = [row for row in comparison.findings if len(row.present) < len(comparison.runs)]
    serious = partial[:1]
    for row in serious:
        yield f"only in {_only_in(row)}: {row.severity.value}: {row.title}"
    rest, shared = len(partial) - len(serious), len(comparison.findings) - len(partial)
    parts = [f"{shared} in all runs"] if shared else []
    parts += [f"{rest}{' more' if serious else ''} in some"] if rest else []
    if parts or not comparison.findings:
        none = "none in any of the runs" if are_complete(comparison) else "none in what was recorded"
        yield f"findings: {', '.join(parts) or none}"


def are_complete(comparison: Comparison) -> bool:
    """Return whether every run was recorded to its end: else no finding means less."""
    return not any(side.lacks for side in comparison.runs)


def _only_in(row: FindingRow) -> str:
    unknown = f" ({', '.join(row.unknown)} not checked)" if row.unknown else ""
    return f"{', '.join(row.present)}{unknown}"
