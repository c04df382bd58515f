"""``collect`` and ``collect_groups``: gradients measured by hand, for loops that no hook fits.

Both start the measurement and return at once; :meth:`Pending.result` waits, once, for its own copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from backlight.capture.hooks import skipped_by_compiler
from backlight.capture.modules import named_parameters
from backlight.capture.parameters import local
from backlight.findings.limits import merge_overrides, with_overrides
from backlight.measure.stats.kernels import root_sum_squares
from backlight.measure.stats.statistics import statistics
from backlight.measure.transfer import PendingArrays as Measured
from backlight.monitors.health.model.parameters import members, ratio
from backlight.monitors.health.model.score import ScoreLimits, health, usual
from backlight.monitors.health.model.score import vanishing as vanishing_mask
from backlight.series import GRADIENT

Parameters = nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, its ``parameters()``, its ``named_parameters()`` or any tensors with a ``.grad``."""


@dataclass(frozen=True, slots=True)
class TensorValues:
    """Measurements of one gradient; everything but ``name`` is void where not ``measured``.

    ``norm``, ``rms``, ``max_abs`` and ``mean`` are in units of the gradient; the others are counts.
    """

    name: str
    measured: bool
    norm: float = math.nan
    rms: float = math.nan
    max_abs: float = math.nan
    mean: float = math.nan
    numel: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0


@dataclass(frozen=True, slots=True)
class GroupValues:
    """Norm and rms over all measured gradients of a group; NaN where none was measured."""

    name: str
    measured: bool
    norm: float
    rms: float
    numel: int

    def ratio(self, other: GroupValues) -> float:
        """Return this group's rms over the other's; see :attr:`Collected.ratios` for 0 and NaN.

        A group that was collected once serves any number of ratios, also with groups of other calls.
        """
        return float(ratio(self.rms, other.rms))


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of one collection.

    Attributes
    ----------
    measured:
        Whether there was any gradient; where there was none, nothing below is a number.
    total_norm:
        L2 norm over all measured gradients, each tensor once.
    health:
        ``clamp(1 - 0.5 share_vanishing - 0.8 share_exploding, 0, 1)``, 0 where a value is not
        finite, None where nothing was measured.
    vanishing, exploding, non_finite:
        How many of the measured gradients are so, each by itself: see :class:`CollectLimits`.
    values:
        Per tensor, in the order given.
    groups:
        Per group; empty for :func:`collect`.
    ratios:
        rms of A over rms of B by ``(A, B)``, no epsilon added: +inf where B is dead and A alive,
        NaN where both are dead or one was not measured.
    """

    measured: bool
    total_norm: float
    health: float | None
    vanishing: int
    exploding: int
    non_finite: int
    values: tuple[TensorValues, ...]
    groups: Mapping[str, GroupValues] = field(default_factory=dict)
    ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectLimits:
    """When the gradient of a parameter vanishes or explodes.

    It vanishes where it is zero, its norm is below ``vanishing``, or its rms is below ``relative_vanishing``
    times the median rms over the parameters, and below ``vanishing_rms`` of the health monitor. It explodes
    where its norm is above ``exploding``, or its rms above ``relative_exploding`` times that median. With a
    clip norm it also explodes where the total norm is above ten times that (``exploding_clip_factor`` of the
    health monitor), and its own norm above its share: that limit over the root of the number of parameters.
    """

    vanishing: float = 1e-7
    exploding: float = 100.0
    relative_vanishing: float = 1e-4
    relative_exploding: float = 1e4

    def __post_init__(self) -> None:
        """Raise ValueError where a limit is negative or NaN."""
        for name, value in dataclasses.asdict(self).items():
            if not value >= 0:
                raise ValueError(f"collect: {name}={value} is out of range; expected 0 or more")


@dataclass
class Pending:
    """A collection in progress; the same type for tensors, groups and nothing at all."""

    _names: tuple[str, ...]
    _measuring: Measured
    _groups: Mapping[str, tuple[int, ...]]
    _limits: CollectLimits
    _score: ScoreLimits
    _clip_norm: float
    _result: Collected | None = None

    def ready(self) -> bool:
        """Return, without waiting, whether :meth:`result` would return at once."""
        return self._result is not None or self._measuring.ready()

    def result(self) -> Collected:
        """Return what was measured, after waiting for it; later calls return the same object."""
        if self._result is None:
            self._result = self._evaluate()
        return self._result

    def _evaluate(self) -> Collected:
        floats, integers = self._measuring.arrays()
        norm, max_abs, total = (floats[:, GRADIENT.floats.index(c)] for c in ("norm", "max_abs", "sum"))
        count = {c: integers[:, i] for i, c in enumerate(GRADIENT.integers)}
        measured = count["measured"] > 0
        size = np.where(count["numel"] > 0, count["numel"], 1)
        rms, mean = norm / np.sqrt(size), total / size
        rows = zip(
            self._names, measured.tolist(), norm.tolist(), rms.tolist(), max_abs.tolist(), mean.tolist(),
            *(count[c].tolist() for c in ("numel", "zeros", "nan", "inf")),
            strict=True,
        )  # fmt: skip
        values = tuple(TensorValues(*row) if row[1] else TensorValues(row[0], False) for row in rows)
        bad = measured & (count["nan"] + count["inf"] > 0)
        whole = float(root_sum_squares(norm[measured])) if measured.any() else math.nan
        vanishes, explodes = self._marks(norm, rms, measured, whole)
        score = float(health(measured, vanishes, explodes, not bad.any(), self._score))
        groups = {name: self._group(name, rows, norm, count, measured) for name, rows in self._groups.items()}
        return Collected(
            measured=bool(measured.any()),
            total_norm=whole,
            health=None if math.isnan(score) else score,
            vanishing=int(vanishes.sum()),
            exploding=int(explodes.sum()),
            non_finite=int(bad.sum()),
            values=values,
            groups=groups,
            ratios={(a, b): groups[a].ratio(groups[b]) for a in groups for b in groups if a != b},
        )

    def _marks(
        self, norm_P: np.ndarray, rms_P: np.ndarray, measured_P: np.ndarray, whole: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which gradients vanish and which explode."""
        limits = self._limits
        relative = dataclasses.replace(self._score, vanishing_relative=limits.relative_vanishing)
        median = usual(rms_P, measured_P)
        most = self._score.exploding_clip_factor * self._clip_norm
        with np.errstate(invalid="ignore", over="ignore"):
            vanishes_P = (norm_P < limits.vanishing) | vanishing_mask(rms_P, measured_P, relative, median)
            explodes_P = (norm_P > limits.exploding) | (rms_P > limits.relative_exploding * median)
            if whole > most:
                explodes_P |= norm_P * math.sqrt(measured_P.sum()) > most
        return measured_P & vanishes_P, measured_P & explodes_P

    @staticmethod
    def _group(
        name: str,
        rows: tuple[int, ...],
        norm: np.ndarray,
        count: Mapping[str, np.ndarray],
        measured: np.ndarray,
    ) -> GroupValues:
        chosen = [row for row in rows if measured[row]]
        if not chosen:
            return GroupValues(name, False, math.nan, math.nan, 0)
        numel = int(count["numel"][chosen].sum())
        whole = float(root_sum_squares(norm[chosen]))
        return GroupValues(name, True, whole, whole / math.sqrt(max(numel, 1)), numel)


@partial(skipped_by_compiler, with_calls=True)
def collect(
    parameters: Parameters,
    *,
    clip_norm: float | None = None,
    vanishing: float = CollectLimits.vanishing,
    exploding: float = CollectLimits.exploding,
    relative_vanishing: float = CollectLimits.relative_vanishing,
    relative_exploding: float = CollectLimits.relative_exploding,
    thresholds: Mapping[str, float] | None = None,
) -> Pending:
    """Measure the gradients of ``parameters`` as they are now.

    Parameters
    ----------
    parameters:
        A module, or tensors with a ``.grad``, plain or with names; a tensor that comes twice counts
        once. Empty input is allowed and gives ``measured=False``.
    clip_norm:
        The clip norm in use: gradients far above it explode.
    vanishing, exploding:
        Norms of the gradient of one parameter, in its unit, 1e-7 and 100 by default.
    relative_vanishing, relative_exploding:
        Multiples of the median rms over the parameters, 1e-4 and 1e4 by default; see
        :class:`CollectLimits`.
    thresholds:
        Overridden thresholds of the health monitor by name.

    Returns
    -------
    Pending
        Not waited for.

    Raises
    ------
    TypeError
        If something is not a tensor.
    ValueError
        If a limit or threshold is unknown or out of range.
    """
    limits = CollectLimits(vanishing, exploding, relative_vanishing, relative_exploding)
    return _start(_named(parameters), {}, limits, clip_norm, thresholds)


@partial(skipped_by_compiler, with_calls=True)
def collect_groups(
    groups: Mapping[str, Parameters | str],
    *,
    model: nn.Module | None = None,
    clip_norm: float | None = None,
    vanishing: float = CollectLimits.vanishing,
    exploding: float = CollectLimits.exploding,
    relative_vanishing: float = CollectLimits.relative_vanishing,
    relative_exploding: float = CollectLimits.relative_exploding,
    thresholds: Mapping[str, float] | None = None,
) -> Pending:
    """Measure the gradients of several groups of parameters, and their ratios.

    Parameters
    ----------
    groups:
        By name: parameters as for :func:`collect`, or a pattern over the names of ``model``, such as
        ``"encoder.*"``. Groups may share tensors; each is measured once.
    model:
        The model that patterns refer to.
    clip_norm, vanishing, exploding, relative_vanishing, relative_exploding, thresholds:
        As for :func:`collect`.

    Returns
    -------
    Pending
        Not waited for.

    Raises
    ------
    ValueError
        If a group matches nothing, or is a pattern without a model, or a limit is out of range.
    TypeError
        If something is not a tensor.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    position: dict[int, int] = {}
    rows: dict[str, list[int]] = {}
    for group, selection in groups.items():
        parameters = _matching(group, selection, model) if isinstance(selection, str) else _named(selection)
        if not parameters:
            raise ValueError(f"collect_groups: the group {group!r} is empty; expected at least one parameter")
        for name, tensor in parameters:
            named.setdefault(id(tensor), (name, tensor))
            rows.setdefault(group, []).append(position.setdefault(id(tensor), len(position)))
    limits = CollectLimits(vanishing, exploding, relative_vanishing, relative_exploding)
    of_groups = {group: tuple(of_group) for group, of_group in rows.items()}
    return _start(list(named.values()), of_groups, limits, clip_norm, thresholds)


def _matching(group: str, pattern: str, model: nn.Module | None) -> list[tuple[str, torch.Tensor]]:
    if model is None:
        raise ValueError(
            f"collect_groups: the group {group!r} is the pattern {pattern!r}; give model= for it"
        )
    by_name = dict(_named(model))
    return [(name, by_name[name]) for name in members(tuple(by_name), pattern)]


def _named(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    if isinstance(parameters, nn.Module):
        pairs: list[tuple[str, torch.Tensor]] = [(n.name, n.parameter) for n in named_parameters(parameters)]
    else:
        pairs = []
        for position, item in enumerate(parameters):
            name, tensor = item if isinstance(item, tuple) else (f"parameter{position}", item)
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"collect: item {position} is {type(tensor).__name__}, expected a tensor with .grad"
                )
            pairs.append((name, tensor))
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in pairs:
        seen.setdefault(id(tensor), (name, tensor))
    return list(seen.values())


def _start(
    named: list[tuple[str, torch.Tensor]],
    groups: Mapping[str, tuple[int, ...]],
    limits: CollectLimits,
    clip_norm: float | None,
    thresholds: Mapping[str, float] | None,
) -> Pending:
    score = with_overrides(ScoreLimits, merge_overrides("health", overrides=thresholds))
    grads = [None if t.grad is None else local(t.grad) for _, t in named]
    limit = math.nan if clip_norm is None else float(clip_norm)
    measuring = statistics(grads, tier="background")  # who measures by hand does so at every step
    return Pending(tuple(name for name, _ in named), measuring, groups, limits, score, limit)
