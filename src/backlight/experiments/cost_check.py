"""The estimate of a configuration: its task is built, timed, and compared with what is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backlight.experiments.config import Configuration
from backlight.experiments.cost_estimate import Estimate, estimate
from backlight.experiments.runner import build, one_machine, pace_of
from backlight.monitors.grokking.instrument.probe_batch import Probe
from backlight.monitors.grokking.model.available_memory import available_bytes
from backlight.monitors.grokking.model.disk_guard import free_bytes
from backlight.monitors.grokking.model.measures import TIERS


class DoesNotFitError(ValueError):
    """A run that would not fit; the message says what is needed, what is free, and the way out."""


@dataclass(frozen=True)
class Choice:
    """The tier that a run takes, and why it is not the full one."""

    tier: str = TIERS[0]
    reason: str = ""


def estimate_of(
    configuration: Configuration,
    path: Path,
    *,
    budget: float = 2.0,
    on_part: Callable[[str], None] = lambda _name: None,
) -> Estimate:
    """Return what a run of ``configuration`` into ``path`` will take; errors are those of building it."""
    task = build(configuration)
    pace = pace_of(configuration)
    measures = configuration.measures.logged_every(pace.log_every)
    probe = Probe(task.model, task.sample_loss, task.probe, task.inputs) if measures.sampled else None
    with one_machine(configuration):
        return estimate(
            task,
            pace,
            measures,
            probe,
            free_disk=free_bytes(path),
            reserve=configuration.keeping.disk_free,
            free_memory=available_bytes(),
            checkpoints=configuration.keeping.checkpoints,
            budget=budget,
            on_part=on_part,
        )


def choose(found: Estimate, *, degrade: bool, ask: Callable[[str], bool] | None = None) -> Choice:
    """Return the tier that fits: the full one, or a cheaper one where that is wanted.

    Parameters
    ----------
    degrade:
        Take a cheaper tier without asking.
    ask:
        Called with a question; None where nobody can be asked.

    Raises
    ------
    DoesNotFitError
        If nothing fits, or a cheaper tier is not wanted.
    """
    tier, reason = found.fitting(), found.problem(TIERS[0])
    if tier == TIERS[0]:
        return Choice()
    if not tier:
        raise DoesNotFitError(
            f"this run does not fit, even with scalars alone: {found.problem(TIERS[-1])}; free some space, "
            "lower keeping.disk_free, or choose smaller settings"
        )
    missing = ", ".join(found.left_out(tier)) or "nothing"
    if degrade or (ask is not None and ask(f"{reason}. Run with {tier} (left out: {missing})?")):
        return Choice(tier, reason)
    raise DoesNotFitError(
        f"this run does not fit: {reason}. With --degrade it runs with {tier} (left out: {missing}); "
        "or set sparser cadences, such as --set measures.gradients=10"
    )
