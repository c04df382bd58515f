"""Numbers of a step under the names that trackers get, for a live run and a stored one.

=========================== =================================================================
``loss``                     sum of the losses given to backward in the step
``loss/<optimizer>``         those of one of several optimizers
``total_norm``               L2 norm of all gradients, before clipping
``lr/<optimizer>/<group>``   learning rates
``phase/<phase>``            seconds
``clip/...``, ``scaler/...`` what clipping and the loss scale did
``cost``                     seconds that backlight took
``norm/<group>``             L2 norm of a group's gradients
``ratio/<group>``            |update| / |weight| of a group
``update_ratio``             the same per parameter, as a histogram
``user/<name>``              what the user logged
=========================== =================================================================

Shapes: P parameters, in the order of their table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backlight.monitors.health.model.parameters import GroupError, members
from backlight.records import Layout, ParameterRecord
from backlight.series import GRADIENT, UPDATE
from backlight.session.trackers.base import Point

MOST_GROUPS = 32
"""Groups that are made of modules where the user named none."""

_LEFT_OUT = frozenset(("time", "batch", "backwards", "backwards_seen", "forwards", "addends"))

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def groups_of(names: Sequence[str], patterns: Mapping[str, str]) -> dict[str, Integers]:
    """Return the rows of each group: the user's groups, else the modules nearest to the root.

    Without patterns the modules of that depth are taken at which there is more than one, as long as they are
    at most :data:`MOST_GROUPS`; a pattern that matches nothing is left out; the fingerprint monitor reports
    it.
    """
    rows: dict[str, Integers] = {}
    place = {name: row for row, name in enumerate(names)}
    for group, pattern in patterns.items():
        try:
            rows[group] = np.array([place[name] for name in members(names, pattern)], dtype=np.int64)
        except GroupError:
            continue
    if patterns:
        return rows
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(1, deepest + 1):
        modules: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            modules.setdefault(".".join(name.split(".")[:-1][:depth]) or name, []).append(row)
        if len(modules) > MOST_GROUPS:
            break
        if len(modules) > 1 or depth == deepest:
            return {group: np.array(of, dtype=np.int64) for group, of in modules.items()}
    return rows


def is_split(records: Sequence[ParameterRecord]) -> bool:
    """Return whether a rank holds only a part of some parameter, so that its norms are not the whole's."""
    return any(r.placement.layout in {Layout.SHARD, Layout.PARTIAL} for r in records)


class Naming:
    """Makes points of one parameter table: what is constant from step to step is found once."""

    def __init__(self, names: Sequence[str], patterns: Mapping[str, str], *, split: bool = False) -> None:
        self._groups = groups_of(names, patterns)
        self._split = split

    def scalars(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return backlight's scalars of a step; those that a single shard cannot know are left out."""
        kept = {name: value for name, value in scalars.items() if name not in _LEFT_OUT}
        if self._split:
            kept.pop("total_norm", None)
        return kept

    def gradient(self, norm_P: Floats, measured_P: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Return the norm of each group of which something was measured, from the norms of parameters."""
        if self._split:
            return {}
        return {
            f"norm/{group}": _root(norm_P[rows][measured_P[rows]])
            for group, rows in self._groups.items()
            if measured_P[rows].any()
        }

    def update(
        self, update_P: Floats, weight_P: Floats, measured_P: npt.NDArray[np.bool_]
    ) -> tuple[dict[str, float], dict[str, Floats]]:
        """Return update over weight of each group, and of all parameters whose weight is not zero."""
        if self._split:
            return {}, {}
        values: dict[str, float] = {}
        for group, rows in self._groups.items():
            seen = rows[measured_P[rows]]
            below = _root(weight_P[seen])
            if len(seen) and below:
                values[f"ratio/{group}"] = _root(update_P[seen]) / below
        some = measured_P & (weight_P > 0)
        ratios = update_P[some] / weight_P[some]
        ratios = ratios[np.isfinite(ratios)]
        return values, {"update_ratio": ratios} if len(ratios) else {}


def point_of_blobs(
    naming: Naming,
    step: int,
    scalars: Mapping[str, float],
    blobs: Mapping[tuple[str, int], tuple[Floats, Integers]],
) -> Point:
    """Return the point of a step that was just recorded, from what goes into the store."""
    values = naming.scalars(scalars)
    spreads: dict[str, Floats] = {}
    if ("gradient", 0) in blobs:
        floats, integers = blobs["gradient", 0]
        norm_P = floats[:, GRADIENT.floats.index("norm")]
        values |= naming.gradient(norm_P, integers[:, GRADIENT.integers.index("measured")] > 0)
    if ("update", 0) in blobs:
        floats, integers = blobs["update", 0]
        update_P, weight_P = (floats[:, UPDATE.floats.index(n)] for n in ("update_norm", "weight_norm"))
        more, spreads = naming.update(update_P, weight_P, integers[:, UPDATE.integers.index("measured")] > 0)
        values |= more
    return Point(step, float(scalars.get("time", math.nan)), values, spreads)


def _root(values: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum(np.square(values))))
