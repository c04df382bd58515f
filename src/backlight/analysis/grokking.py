"""A run, its verdict, its matched control and what follows its test accuracy, put together. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backlight.findings.limits import merge_overrides, with_overrides
from backlight.monitors.grokking.model.curves import DetectionError, change_points
from backlight.monitors.grokking.model.lead_lag import LeadLag, lead_lags
from backlight.monitors.grokking.model.reader import (
    TEST,
    Stated,
    control_of,
    detect_run,
    has_accuracies,
    stated,
)
from backlight.monitors.grokking.model.verdicts import Detection, LeadLagLimits, VerdictLimits
from backlight.records import to_json
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run

NEIGHBOURS = 200
"""Most folders beside a run that are looked into for its control."""


@dataclass(frozen=True)
class Examined:
    """One run with its verdict; ``control`` is the matched run with random labels, where there is one.

    ``changes`` are the change points of the test accuracy, None where ``ruptures`` is not installed.
    """

    run: Run
    facts: Stated
    detection: Detection
    control: Run | None
    control_detection: Detection | None
    following: tuple[LeadLag, ...]
    changes: tuple[int, ...] | None

    def as_json(self) -> dict[str, Any]:
        """Return everything but the runs themselves as JSON types."""
        plain: dict[str, Any] = {
            "run": str(self.run.path),
            "name": self.run.name,
            "facts": to_json(self.facts),
            **to_json(self.detection),
            "control": None,
            "following": [to_json(row) for row in self.following],
            "change_points": None if self.changes is None else list(self.changes),
        }
        if self.control is not None and self.control_detection is not None:
            plain["control"] = {"run": str(self.control.path), **to_json(self.control_detection)}
        return plain


def examine(
    run: Run,
    candidates: Sequence[Run] = (),
    *,
    control: Run | None = None,
    chance: float | None = None,
    test_size: int | None = None,
) -> Examined:
    """Judge ``run`` and compare its measures with those of its control.

    Parameters
    ----------
    run:
        A stored run that logged both accuracies.
    candidates:
        Runs among which its control may be; the one whose event ``grokking`` says so is taken.
    control:
        The control itself, whatever its event says.
    chance, test_size:
        Used in place of what the run states.

    Raises
    ------
    DetectionError
        If the run did not log both accuracies, or they cannot be judged.
    """
    overrides = merge_overrides("grokking", run.overrides.get("grokking"))
    limits = limits_of(run)
    detection = detect_run(run, limits, chance=chance, test_size=test_size)
    found = control if control is not None else control_of(run, candidates)
    theirs = None
    if found is not None:
        theirs = detect_run(found, limits, chance=chance, test_size=test_size)
    test = run.scalar(TEST, source="user")
    return Examined(
        run=run,
        facts=stated(run),
        detection=detection,
        control=found,
        control_detection=theirs,
        following=lead_lags(run, detection, found, with_overrides(LeadLagLimits, overrides)),
        changes=change_points(test.steps, test.values),
    )


def limits_of(run: Run) -> VerdictLimits:
    """Return the limits of the verdict as the run overrode them."""
    return with_overrides(VerdictLimits, merge_overrides("grokking", run.overrides.get("grokking")))


def examined_where_possible(run: Run) -> Examined | None:
    """Examine a run together with the folders beside it; None where its accuracies allow no verdict."""
    if not has_accuracies(run):
        return None
    found = control_of(run, beside(run.path))
    if found is not None and not has_accuracies(found):
        found = None
    try:
        return examine(run, control=found)
    except DetectionError:
        return None  # the rule of the verdict says why, as a finding


def beside(path: Path) -> Iterator[Run]:
    """Yield the runs in the folders beside ``path`` and below it, those that can be opened."""
    path = path.resolve()
    try:
        folders = [entry for base in (path.parent, path) for entry in sorted(base.iterdir())]
    except OSError:
        return
    runs = [f for f in folders if f != path and (f / "manifest.json").is_file()]
    for folder in runs[:NEIGHBOURS]:
        try:
            yield open_run(folder)
        except (StoreError, OSError, ValueError):
            continue  # somebody else's folder; the run itself is what was asked for
