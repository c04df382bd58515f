"""Grokking analysis of a run: verdict, matched control, lead and lag of its measures. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backlight import codec
from backlight.answer import Answer, Column, Table, word
from backlight.findings.limits import merge_overrides, with_overrides
from backlight.monitors.grokking.model.curves import DetectionError, change_points
from backlight.monitors.grokking.model.lead_lag import FOLLOWS, LeadLag, lead_lags, needed_of_each
from backlight.monitors.grokking.model.reader import (
    TEST,
    Stated,
    controls_of,
    detect_run,
    has_accuracies,
    seeds_of,
    stated,
)
from backlight.monitors.grokking.model.verdicts import Detection, LeadLagLimits, VerdictLimits
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run
from backlight.text import count, listed, number, visible

MAX_NEIGHBOURS = 200
"""Directories next to a run that are searched for its control."""


@dataclass(frozen=True)
class GrokkingAnalysis:
    """One run with its verdict; ``control`` is the matched run with random labels, where there is one.

    Its measures are compared with those of all ``controls``, together with other ``seeds`` of the run;
    ``needed`` is the number of each that can find a single measure. ``changes`` are the change points of the
    test accuracy, None where ``ruptures`` is not installed.
    """

    run: Run
    facts: Stated
    detection: Detection
    control: Run | None
    controls: tuple[Run, ...]
    seeds: tuple[Run, ...]
    needed: int
    control_detection: Detection | None
    following: tuple[LeadLag, ...]
    changes: tuple[int, ...] | None

    def signals(self) -> str:
        """Return the measures that follow while the controls do not, or why none can be named."""
        runs, controls = len(self.seeds) + 1, len(self.controls)
        counted = f"{count(runs, 'run')} and {count(controls, 'control')}"
        names = [visible(row.measure) for row in self.following if row.conclusion == FOLLOWS]
        if names:
            return f"Follow, and the controls do not ({counted}): {listed(names, 12)}."
        if runs < self.needed or controls < self.needed:
            return (
                f"No measure is distinguished from its controls by {counted}; {self.needed} seeds of each "
                f"can do so (--seeds 0-{self.needed - 1} --control random-labels)."
            )
        return f"No measure follows that does not in the controls ({counted})."

    def as_json(self) -> dict[str, Any]:
        """Return everything but the runs themselves as JSON types."""
        plain: dict[str, Any] = {
            "run": str(self.run.path),
            "name": self.run.name,
            "facts": codec.plain(self.facts),
            **codec.plain(self.detection),
            "control": None,
            "controls": [str(control.path) for control in self.controls],
            "seeds": [str(seed.path) for seed in self.seeds],
            "needed": self.needed,
            "following": [codec.plain(row) for row in self.following],
            "change_points": None if self.changes is None else list(self.changes),
        }
        if self.control is not None and self.control_detection is not None:
            plain["control"] = {"run": str(self.control.path), **codec.plain(self.control_detection)}
        return plain


_STATE = {True: "holds", False: "fails", None: "not known"}


def answer(analysis: GrokkingAnalysis) -> Answer:
    """Return the verdict, times, conditions, sweep and control, and what follows the test accuracy."""
    detection, facts = analysis.detection, [analysis.detection.claim]
    if detection.sweep:
        accuracies, shares = (
            [p.train_accuracy for p in detection.sweep],
            [p.test_share for p in detection.sweep],
        )
        facts.append(
            f"sweep: grokking at {sum(p.grokking for p in detection.sweep)} of {len(detection.sweep)} "
            f"lines, training accuracy {min(accuracies):.3g} to {max(accuracies):.3g}, {min(shares):.3g} to "
            f"{max(shares):.3g} of the way to the plateau"
        )
    if analysis.changes:
        shown = ", ".join(number(step) for step in analysis.changes[:8])
        facts.append(f"change points of the test accuracy: step {shown}")
    if analysis.control is not None and (theirs := analysis.control_detection) is not None:
        facts.append(f"control {visible(analysis.control.path.name)}: {theirs.words}. {theirs.claim}")
    conditions = (
        word("condition", "name"), word("expected", "expected", "text"), word("got", "got", "text"),
        word("", lambda condition: _STATE[condition.held]),
    )  # fmt: skip
    about = filter(
        None, (analysis.facts.experiment, analysis.facts.control and f"control: {analysis.facts.control}")
    )
    return Answer(
        f"{', '.join((analysis.run.location, *about))}: {detection.words}",
        analysis.as_json(),
        tuple(facts),
        (
            *([Table(conditions, detection.conditions)] if detection.conditions else []),
            # The test accuracy of a control is noise, which nothing can follow.
            *([following_table(analysis)] if analysis.following and not analysis.facts.control else []),
        ),
        tuple(_notes(analysis)),
    )


def _notes(analysis: GrokkingAnalysis) -> Iterator[str]:
    """Yield what was not measured, and how the table of what follows is read."""
    if analysis.changes is None:
        yield "change points: not measured; pip install 'backlight[research]'"
    yield from analysis.detection.notes
    if analysis.facts.control:
        return
    if analysis.control is None or analysis.control_detection is None:
        yield (
            "no matched control was found: no measure can be attributed to grokking. Run the same with "
            "--control random-labels"
        )
    if analysis.following:
        yield "corr.: rank correlation with the test accuracy after memorisation; lead in steps"
    if analysis.following and analysis.controls:
        yield (
            "control: how far the measure of the controls moves with it, as a share; q: false-discovery rate "
            "at which the two differ"
        )
        yield analysis.signals()


def following_table(analysis: GrokkingAnalysis) -> Table:
    """Return the measures that correlate with the test accuracy, the strongest first, and controls."""
    of_control = (
        Column("control", "control", _signed), Column("its end", lambda row: row.levels[1], _digits),
        Column("q", "q", lambda q: number(q, 2)),
    )  # fmt: skip
    columns = (
        word("measure", lambda row: row.measure.removeprefix("gram/model/").removeprefix("progress/")),
        Column("corr.", "correlation", _signed),
        Column("lead", lambda row: row.lead_steps if row.lead_logs else 0, lambda steps: f"{steps:+,}"),
        Column("end", lambda row: row.levels[0], _digits),
        # Without a control every row would repeat what is said of the run.
        *(of_control if analysis.controls else ()),
        word("", "conclusion"),
    )
    return Table(columns, analysis.following, brief=10, wide=1)


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _digits(value: float) -> str:
    return number(value, 3)


def analyse(
    run: Run,
    candidates: Sequence[Run] = (),
    *,
    controls: Sequence[Run] = (),
    chance: float | None = None,
    test_size: int | None = None,
) -> GrokkingAnalysis:
    """Evaluate ``run`` and compare its measures with those of its controls.

    ``controls`` are used whatever their events say; otherwise they are searched among ``candidates``, as
    other seeds of the run are. ``chance`` and ``test_size`` replace what the run states. Without both
    accuracies it raises :class:`DetectionError`.
    """
    overrides = merge_overrides("grokking", run.overrides.get("grokking"))
    limits = limits_of(run)
    detection = detect_run(run, limits, chance=chance, test_size=test_size)
    seeds = seeds_of(run, candidates)
    against = list(controls) or controls_of(run, candidates, seeds)
    control = next((other for other in against if has_accuracies(other)), None)
    theirs = None
    if control is not None:
        theirs = detect_run(control, limits, chance=chance, test_size=test_size)
    test = run.scalar(TEST, source="user")
    comparison = with_overrides(LeadLagLimits, overrides)
    following = lead_lags(run, detection, against, seeds, comparison)
    tested = sum(row.p is not None for row in following) or len(following)
    return GrokkingAnalysis(
        run=run,
        facts=stated(run),
        detection=detection,
        control=control,
        controls=tuple(against),
        seeds=tuple(seeds),
        needed=needed_of_each(tested, comparison.false_discovery_rate),
        control_detection=theirs,
        following=following,
        changes=change_points(test.steps, test.values),
    )


def limits_of(run: Run) -> VerdictLimits:
    """Return the limits of the verdict as the run overrode them."""
    return with_overrides(VerdictLimits, merge_overrides("grokking", run.overrides.get("grokking")))


def analyse_if_possible(run: Run) -> GrokkingAnalysis | None:
    """Analyse a run together with its neighbours; None where its accuracies allow no verdict."""
    if not has_accuracies(run):
        return None
    try:
        return analyse(run, tuple(neighbours(run.path)))
    except DetectionError:
        return None  # the rule ``grokking`` reports why


def neighbours(path: Path) -> Iterator[Run]:
    """Yield the readable runs in the directories next to ``path`` and below it."""
    path = path.resolve()
    try:
        folders = [entry for base in (path.parent, path) for entry in sorted(base.iterdir())]
    except OSError:
        return
    runs = [f for f in folders if f != path and (f / "manifest.json").is_file()]
    for folder in runs[:MAX_NEIGHBOURS]:
        try:
            yield open_run(folder)
        except (StoreError, OSError, ValueError):
            continue  # not a readable run; only the requested one must be
