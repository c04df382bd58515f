"""Repeats of a run: equal runs and attempts in its directory, which show how much equal runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from backlight.analysis.fingerprint_diff import Role, assign_roles, differences, normalize
from backlight.monitors.steptime.model.step_comparison import medians
from backlight.records import Fingerprint
from backlight.store.errors import RunFormatError
from backlight.store.format.names import MANIFEST
from backlight.store.read.run import Run, open_run

MAX_RUNS = 32
"""Runs of a directory that are looked at, the newest first."""

SEEDS = frozenset({"seed", "random_seed", "manual_seed", "data_seed", "rng_seed"})
"""Arguments that are assumed to set a seed: runs that differ in them alone are repeats."""


def groups_of_repeats(a: Run, b: Run) -> list[list[Mapping[str, float]]]:
    """Return the medians by phase of the repeats of two runs, which belong to their groups.

    Where both runs are equal their own difference is the question: it is left out.
    """
    one, other = a.fingerprint(), b.fingerprint()
    if one is None or other is None:
        return []
    given = {a.path.resolve(), b.path.resolve()}
    if _is_equal(one, other) and a.monitors == b.monitors:
        return [list(_repeats(a, one, given))]
    return [
        list(_repeats(run, fingerprint, given - {run.path.resolve()}))
        for run, fingerprint in ((a, one), (b, other))
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
                found = medians(other, attempt.index)
                if found is not None:
                    yield found


def _neighbours(path: Path) -> list[Path]:
    try:
        found = [p for p in path.parent.iterdir() if p != path and (p / MANIFEST).is_file()]
        return sorted(found, key=lambda p: -(p / MANIFEST).stat().st_mtime)[:MAX_RUNS]
    except OSError:
        return []


def _is_equal(a: Fingerprint, b: Fingerprint) -> bool:
    """Return whether two fingerprints agree on one machine, seeds and output paths aside."""
    return all(
        (d.role is Role.NOTE and d.field not in {"host", "versions.backlight"})
        or (d.field.startswith("arguments.") and normalize(d.field.partition(".")[2]) in SEEDS)
        for d in assign_roles(differences((a, b)), None)
    )
