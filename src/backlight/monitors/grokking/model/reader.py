"""A stored run as the grokking monitor reads it: its accuracies, and the facts in the event ``grokking``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backlight.monitors.grokking.model.curves import DetectionError
from backlight.monitors.grokking.model.detection import detect
from backlight.monitors.grokking.model.verdicts import Detection, VerdictLimits
from backlight.store.read.run import Run

TRAIN, TEST = "train_accuracy", "test_accuracy"


@dataclass(frozen=True)
class Stated:
    """Facts that a run states about itself; None or empty if it does not.

    ``control`` is ``"random-labels"`` in a control run, and ``control_of`` its run by run id, name or
    directory. ``chance`` and both sizes may also be scalars that the user logged.
    """

    experiment: str = ""
    control: str = ""
    control_of: str = ""
    chance: float | None = None
    train_size: int | None = None
    test_size: int | None = None
    seed: int | None = None


def stated(run: Run) -> Stated:
    """Return the facts in the newest event ``grokking`` of the run, and in scalars of the user."""
    events = run.events("grokking")
    logged = {*run.scalar_names("user")} & {"chance", "train_size", "test_size"}
    last = {name: run.scalar(name, source="user").values[-1].item() for name in logged}
    payload: Mapping[str, Any] = {**last, **(events[-1].payload if events else {})}

    def number(name: str, kind: type[float] | type[int]) -> Any:
        value = payload.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return kind(value)

    return Stated(
        experiment=str(payload.get("experiment") or ""),
        control=str(payload.get("control") or ""),
        control_of=str(payload.get("control_of") or ""),
        chance=number("chance", float),
        train_size=number("train_size", int),
        test_size=number("test_size", int),
        seed=number("seed", int),
    )


def has_accuracies(run: Run) -> bool:
    """Return whether both accuracies were logged."""
    names = set(run.scalar_names("user"))
    return {TRAIN, TEST} <= names


def detect_run(
    run: Run,
    limits: VerdictLimits | None = None,
    *,
    chance: float | None = None,
    test_size: int | None = None,
) -> Detection:
    """Return the verdict on a stored run.

    Parameters
    ----------
    run:
        A stored run with the scalars ``train_accuracy`` and ``test_accuracy``.
    limits:
        Limits; None for the defaults.
    chance, test_size:
        Override the facts of the run.

    Raises
    ------
    DetectionError
        If an accuracy was not logged or allows no verdict; the message names the run.
    """
    logged = run.scalar_names("user")
    missing = [name for name in (TRAIN, TEST) if name not in logged]
    if missing:
        others = ", ".join(logged[:8]) or "nothing"
        raise DetectionError(
            f"{run.path}: no {' and no '.join(missing)} was logged, and the verdict needs both; log "
            f"them with watch.log({', '.join(f'{name}=...' for name in missing)}). The run logged {others}"
        )
    facts = stated(run)
    train, test = (run.scalar(name, source="user") for name in (TRAIN, TEST))
    try:
        return detect(
            train.steps,
            train.values,
            test.steps,
            test.values,
            chance=facts.chance if chance is None else chance,
            train_size=facts.train_size,
            test_size=facts.test_size if test_size is None else test_size,
            limits=limits,
        )
    except DetectionError as error:
        raise DetectionError(f"{run.path}: {error}") from None


def controls_of(run: Run, candidates: Iterable[Run], seeds: Sequence[Run] = ()) -> list[Run]:
    """Return the controls of ``run``, the newest first, then those of other ``seeds`` of it."""

    def of(seed: Run) -> list[Run]:
        names = {seed.run_id, seed.name, str(seed.path), seed.path.name, str(seed.path.resolve())} - {""}
        controls = [
            other
            for other in others
            if other.run_id != seed.run_id and (facts := stated(other)).control and facts.control_of in names
        ]
        return sorted(controls, key=lambda other: other.attempts[-1].started, reverse=True)

    others = list(candidates)
    return list({other.run_id: other for seed in (run, *seeds) for other in of(seed)}.values())


def seeds_of(run: Run, candidates: Iterable[Run]) -> list[Run]:
    """Return the runs with both accuracies that were trained as ``run`` was, from another seed each."""
    trained, facts = _trained_as(run), stated(run)
    by_seed = {facts.seed: run}
    for other in candidates:
        theirs = stated(other)
        if not trained or other.run_id == run.run_id or theirs.control != facts.control:
            continue
        if _trained_as(other) == trained and has_accuracies(other):
            by_seed.setdefault(theirs.seed, other)
    return [other for other in by_seed.values() if other is not run]


def _trained_as(run: Run) -> Mapping[str, Any]:
    """Return experiment and settings of the run, without what does not change its training; or nothing."""
    events = run.events("grokking")
    payload = events[-1].payload if events else {}
    settings = payload.get("settings")
    if not payload.get("experiment") or not isinstance(settings, Mapping):
        return {}
    left_out = {"seed", "device", "control", "measures", "run"}
    kept = {key: value for key, value in settings.items() if key not in left_out}
    return {"experiment": payload["experiment"], **kept}
