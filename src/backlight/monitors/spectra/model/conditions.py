"""What the spectra of a layer can show that deserves a finding: pure functions on numbers that are stored.

No torch here: rules call these on a stored run, and a session on what it has just measured. Each returns
a :class:`Condition`, or None where there is nothing to say or nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.monitors.spectra.model.thresholds import Thresholds


@dataclass(frozen=True)
class Condition:
    """Something that holds for a layer at a step.

    Attributes
    ----------
    name
        Which condition.
    value, bound
        What was measured, and what it was compared with.
    directions
        Numbers of the directions that it holds for, strongest first; empty where it is about the layer.
    """

    name: str
    value: float
    bound: float
    directions: tuple[int, ...] = ()


def below_noise(identifiable: int, strongest: float, edge: float) -> Condition | None:
    """Tell whether no direction of a layer can be found in one replicate.

    Parameters
    ----------
    identifiable
        Number of identifiable directions.
    strongest
        Largest singular value of a replicate (median over the replicates), NaN if not measured.
    edge
        Bulk edge of the noise.
    """
    return Condition("below_noise", strongest, edge) if identifiable == 0 else None


def batch_far_from_critical(
    batch: float, noise_scale: float, limits: Thresholds | None = None
) -> Condition | None:
    """Tell whether the batch of a step is far from the noise scale; ``value`` is their ratio.

    Parameters
    ----------
    batch
        Size of the whole batch of a step, in the unit of ``noise_scale``.
    noise_scale
        Simple noise scale; infinite where no signal was found.
    limits
        Thresholds of the monitor.
    """
    factor = (limits or Thresholds()).batch_factor
    if math.isnan(noise_scale) or math.isnan(batch) or batch <= 0:
        return None
    ratio = math.inf if noise_scale == 0 else batch / noise_scale
    if ratio > factor:
        return Condition("batch_far_from_critical", ratio, factor)
    if ratio < 1 / factor:
        return Condition("batch_far_from_critical", ratio, 1 / factor)
    return None


def rank_collapse(
    stable_rank: float | None, earlier: Sequence[float], limits: Thresholds | None = None
) -> Condition | None:
    """Tell whether the stable rank of an update has fallen to about one.

    Parameters
    ----------
    stable_rank
        Of the update at this step; None or NaN if undefined.
    earlier
        The same at earlier steps of the run; without any there is nothing to have fallen from.
    limits
        Thresholds of the monitor.
    """
    limits = limits or Thresholds()
    known = [rank for rank in earlier if not math.isnan(rank)]
    if stable_rank is None or math.isnan(stable_rank) or not known:
        return None
    bound = min(limits.collapse_rank, limits.collapse_share * float(np.median(known)))
    return Condition("rank_collapse", stable_rank, bound) if stable_rank < bound else None


def modes_too_close(blocks: Sequence[tuple[int, int]]) -> Condition | None:
    """Tell which directions noise turns into their neighbours, by their strengths alone.

    Parameters
    ----------
    blocks
        Ranges of directions that noise turns into one another; see
        :class:`backlight.measure.spectra.result.SpectralEcho`. ``value`` is the size of the largest.
    """
    wide = [(begin, end) for begin, end in blocks if end - begin > 1]
    if not wide:
        return None
    largest = max(end - begin for begin, end in wide)
    members = tuple(i for begin, end in wide for i in range(begin, end))
    return Condition("modes_too_close", float(largest), 1.0, members)
