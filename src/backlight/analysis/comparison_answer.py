"""Answers of ``compare``: what differs between runs or commands, facts, tables, and their HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import ComparedFinding, Comparison
from backlight.analysis.report import source_of
from backlight.analysis.side_by_side import MatchedRow
from backlight.answer import Answer, Column, Table, indexed, word
from backlight.monitors.steptime.model.step_comparison import TimeComparison, TimeRow
from backlight.report.overlay import compared, curve_panels, listing
from backlight.report.page import document, write_page
from backlight.store.read.run import Run
from backlight.text import count, duration, listed, number, visible

RUNS, SHOWN = 3, 3
"""Runs, and parts of another fact, that are listed."""


def answer(comparison: Comparison) -> Answer:
    """Return final and best loss of each run; without losses, what differs between the runs."""
    verdict = loss_line(comparison) or comparison.headline
    facts = tuple(_facts(comparison, verdict))
    return Answer(verdict, comparison, facts, tuple(comparison_tables(comparison).values()))


def ab_answer(result: ABTest) -> Answer:
    """Return the difference of two interleaved commands."""
    basis = f"{100 * result.times.confidence:.0f} % intervals from {result.rounds} pairs of interleaved runs"
    named = [f"{name}: {command}" for name, command in zip("AB", result.commands, strict=True)]
    facts = (*named, *_times_facts(result.times, basis), *result.remarks)
    tables = (_times(result.times, "median time"),) if result.times.rows else ()
    return Answer(result.times.verdict, result, facts, tables)


def comparison_tables(comparison: Comparison) -> dict[str, Table]:
    """Return the tables of a comparison by their title on a page; those that have no rows are left out."""
    sides, letters = comparison.runs, [side.letter for side in comparison.runs]
    rows = [
        ("run", *(side.path for side in sides)),
        ("status", *(side.status for side in sides)),
        ("steps", *(number(side.steps) for side in sides)),
        ("took", *("" if side.seconds is None else duration(side.seconds) for side in sides)),
        *((difference.name, *difference.values) for difference in comparison.differences),
    ]
    over = ("the runs have no recorded step in common",)
    if comparison.steps is not None:
        first, last = comparison.steps
        over = (f"medians over steps {first:,} to {last:,}, the last quarter of the common ones",)
    differing = [row for row in comparison.rows if not row.is_equal]
    equal = [row for row in comparison.rows if row.is_equal]
    parameters = [row for row in comparison.parameters if not row.is_equal]

    def title(times: TimeComparison) -> str:
        return f"Step time of {times.names[1]}" if len(letters) > 2 else "Step time"

    tables = {
        "What differs": Table(indexed(("configuration", *letters), "text"), rows, brief=60),
        "Results": _series("series", differing, letters, over),
        "Parameters that differ most": _series("parameter", parameters, letters, ()),
        **({"Step times": _steps(comparison.times)} if len(letters) > 2 else {}),
        **{title(times): _times(times, "median time") for times in comparison.times},
        "Findings": Table(
            (
                word("severity", lambda row: row.severity.value),
                word("in", lambda row: ", ".join(row.present)),
                word("not checked", lambda row: ", ".join(row.unknown) or "none"),
                word("finding", "title", "text"),
            ),
            comparison.findings, brief=60,
        ),
        "Equal rows": _series("equal in all", equal, letters, ()),
    }  # fmt: skip
    if comparison.kinds is not None:
        tables["Kinds of operation"] = _times(comparison.kinds, "kind of operation")
    return {title: table for title, table in tables.items() if table.rows}


def _series(title: str, rows: Sequence[MatchedRow], letters: Sequence[str], notes: tuple[str, ...]) -> Table:
    sides = (Column(letter, partial(_side, side), str) for side, letter in enumerate(letters))
    ratio = [Column("B÷A", "ratio", lambda value: f"{value:.3f}")] if len(letters) == 2 else []
    return Table((word(title, "name"), *sides, *ratio), rows, brief=60, notes=notes)


def _steps(all_times: Sequence[TimeComparison]) -> Table:
    """Return the step time of each run against the first."""
    tested = [times for times in all_times if times.rows]
    steps = [(times.names[1], times.rows[0].second_ms, times.rows[0]) for times in tested]
    first = [(times.names[0], times.rows[0].first_ms, None) for times in tested[:1]]
    return Table(
        (
            word("median step", itemgetter(0)), Column("ms", itemgetter(1), lambda ms: f"{ms:.2f}"),
            Column("÷A", lambda row: row[2] and row[2].ratio, lambda ratio: f"{ratio:.3f}"),
            Column("interval", lambda row: row[2] and _interval(row[2]), str),
            word("", lambda row: row[2] and row[2].verdict),
        ),
        [*first, *steps],
    )  # fmt: skip


def _interval(row: TimeRow) -> str:
    return row.text.partition(" ")[2].strip("()")


def _side(side: int, row: MatchedRow) -> str:
    return row.texts[side]


def _times(times: TimeComparison, title: str) -> Table:
    baseline, other = times.names
    whole = times.rows[0].first_ms if times.rows else 0.0

    def ms(value: float) -> str:
        return f"{value:.{3 if whole < 10 else 2}f}"

    return Table(
        (
            word(title, lambda row: row.name.replace("_", " ")), Column(f"{baseline} ms", "first_ms", ms),
            Column(f"{other} ms", "second_ms", ms),
            Column(f"{other}÷{baseline}", "ratio", lambda value: f"{value:.3f}"),
            Column("interval", _interval, str), word("", "verdict"),
        ),
        times.rows, brief=60, notes=(*times.trouble, times.basis),
    )  # fmt: skip


def loss_line(comparison: Comparison) -> str:
    """Return final and best loss of each run, by what the losses are called; empty where no run has one."""
    rows = {row.name: row for row in comparison.rows}
    return " ".join(_loss_line(comparison, rows, label) for label in _losses(comparison))


def _losses(comparison: Comparison) -> list[str]:
    """Return what the losses of the runs are called."""
    names = [row.name.partition("step of the best ") for row in comparison.rows]
    return [label for before, _, label in names if label and not before]


def _loss_line(comparison: Comparison, rows: Mapping[str, MatchedRow], label: str) -> str:
    final, best, steps = (rows[f"{which} {label}"] for which in ("final", "best", "step of the best"))
    if final.is_equal and best.is_equal:
        return f"Final {label}: {final.texts[0]} in all runs; best: {best.texts[0]}."
    bests = [f"{text} at step {step}" for text, step in zip(best.texts, steps.texts, strict=True)]
    return f"Final {label}: {_by_run(comparison, final)}; best: {_by_run(comparison, best, bests)}."


def _by_run(comparison: Comparison, row: MatchedRow, texts: Sequence[str] = ()) -> str:
    rows = zip(comparison.runs, row.values, texts or row.texts, strict=True)
    return listed([f"{side.letter} {text}" for side, value, text in rows if value is not None], RUNS)


def _facts(comparison: Comparison, verdict: str) -> list[str]:
    """Return the lines behind the verdict: what differs first, step times last."""
    differing = [f"{d.name} {_slashed(d.values)}" for d in comparison.differences]
    lines = [*_runs(comparison)]
    lines += [] if verdict == comparison.headline else [comparison.headline]
    lines += _listed("configuration", differing)
    lines += comparison.notes[:2]
    lines += _findings(comparison)
    tested = [times for times in comparison.times if times.rows]
    if len(comparison.times) == 1:
        lines += [*(times.verdict for times in tested), *_times_facts(comparison.times[0])]
    elif tested:
        lines += [_times_line(tested)]
        lines += [f"{t.names[1]}÷A is {t.rows[0].text}: {t.rows[0].verdict}" for t in tested[: RUNS - 1]]
        lines += dict.fromkeys(times.variation_text for times in tested[:1])
    lines += _slashed_rows("series", _other_rows(comparison))
    lines += _slashed_rows("parameters that differ most", comparison.parameters)
    return [*lines, *comparison.notes[2:]]


def _other_rows(comparison: Comparison) -> list[MatchedRow]:
    losses = tuple(f" {label}" for label in _losses(comparison))
    return [row for row in comparison.rows if not row.name.endswith(losses)]


def _times_line(tested: Sequence[TimeComparison]) -> str:
    differing = [
        f"{times.names[1]} is {times.rows[0].verdict}" for times in tested if times.rows[0].is_significant
    ]
    rest = len(tested) - len(differing)
    undecided = [f"{count(rest, 'run')} undecided"] if rest else []
    return f"Step time against A: {listed([*differing, *undecided], RUNS)}."


def _times_facts(times: TimeComparison, basis: str = "") -> list[str]:
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


def _slashed_rows(title: str, rows: Sequence[MatchedRow]) -> Iterator[str]:
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
        # Else no finding means less.
        is_complete = not any(side.lacks for side in comparison.runs)
        none = "none in any of the runs" if is_complete else "none in what was recorded"
        yield f"findings: {', '.join(parts) or none}"


def _only_in(row: ComparedFinding) -> str:
    unknown = f" ({', '.join(row.unknown)} not checked)" if row.unknown else ""
    return f"{', '.join(row.present)}{unknown}"


# A comparison as one HTML file: differences, tables side by side, and curves of all runs in a chart each.


def write_comparison(comparison: Comparison, runs: Sequence[Run], target: Path) -> Path:
    """Write the page of compared runs to ``target`` and return its path."""
    title = " against ".join(side.name or side.path for side in comparison.runs)
    named = [
        (f"{side.letter} {visible(side.path)}", run) for side, run in zip(comparison.runs, runs, strict=True)
    ]
    steps = 0, max(run.last_step() for run in runs)
    detail = " ".join(filter(None, (loss_line(comparison), *comparison.notes)))
    state = compared(title, len(runs), detail, headline=comparison.headline, steps=steps)
    state["verdict"]["status"] = " ".join(times.verdict for times in comparison.times)
    curves = list(curve_panels([(name, source_of(run, ())) for name, run in named]))
    loss = [{**panel, "place": "full"} for panel in curves if panel["name"] == "loss"]
    panels = [*loss, *_tables(comparison), *(panel for panel in curves if panel["name"] != "loss")]
    return write_page(document({**state, "panels": panels}, visible(title)), target)


def _tables(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for title, table in comparison_tables(comparison).items():
        notes = [f"{note[:1].upper()}{note[1:]}." for note in table.notes]
        place = "details" if title == "Equal rows" else "full"
        yield listing(replace(table, title=title), remarks=notes, place=place)
