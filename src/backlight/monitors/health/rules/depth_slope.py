"""Rule ``depth_slope``: the gradient shrinks or grows geometrically from block to block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.records import Evidence, Finding, ParameterRecord, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

SAMPLED_STEPS = 64
"""Recorded steps, evenly spread, that the medians and the agreement are taken over."""


@dataclass(frozen=True)
class _Ladder:
    """Comparable parameters along the depth: columns of the frame, the depth of each, and the fitted line."""

    title: str
    columns: NDArray[np.int64]
    depths: NDArray[np.float64]
    slope: float = 0.0  # of log rms per block
    explained: float = 0.0
    agreement: float = 0.0

    @property
    def fold(self) -> float:
        """Ratio between the first and the last parameter by the fitted line."""
        return float(np.exp(abs(self.slope) * (self.depths[-1] - self.depths[0])))


@dataclass(frozen=True)
class DepthLimits(Limits, monitor="health"):
    """Limits of the rule ``depth_slope``."""

    depth_blocks: int = limit(
        6, "comparable parameters along the depth: a slope over fewer points is a guess", low=3
    )
    depth_ratio: float = limit(
        100.0,
        "ratio of rms between the first and the last of them that the fitted slope must reach; sound "
        "residual networks stay within about 10",
        low=1.0,
    )
    depth_r2: float = limit(
        0.8, "share of the variance of log rms that the fitted line must explain", high=1.0
    )
    depth_agreement: float = limit(
        0.8, "share of steps whose own slope reaches half of it with the same sign", high=1.0
    )
    depth_steps: int = limit(10, "recorded steps that the rule needs", low=1)


@rule("depth_slope", monitor="health", limits=DepthLimits, needs=("gradient",))
def depth_slope(run: Run, limits: DepthLimits) -> Iterator[Finding]:
    """Fit log rms against depth over weight matrices of one kind; report the steepest that hold."""
    frame = run.frame("gradient", "rms")
    usable_SP = frame.measured & np.isfinite(frame.values) & (frame.values > 0)
    rows = np.flatnonzero(usable_SP.any(axis=1))
    if len(rows) < limits.depth_steps:
        return
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, SAMPLED_STEPS).round().astype(int))]
    logs_KP = np.log(np.where(usable_SP[rows], frame.values[rows], np.nan))
    found: list[_Ladder] = []
    evaluated = 0
    for stack in _ladders(run.parameters(), frame.names, limits.depth_blocks):
        present = np.isfinite(logs_KP[:, stack.columns]).mean(axis=0) >= 0.5
        if present.sum() < limits.depth_blocks:
            continue
        evaluated += 1
        ladder = _fit(stack.title, stack.columns[present], stack.depths[present], logs_KP)
        clear = ladder.explained >= limits.depth_r2 and ladder.agreement >= limits.depth_agreement
        if ladder.fold >= limits.depth_ratio and clear:
            found.append(ladder)
    if not found:
        return
    ladder = max(found, key=lambda one: one.fold)
    medians = np.exp(np.nanmedian(logs_KP[:, ladder.columns], axis=0))
    first, last = (frame.names[int(ladder.columns[i])] for i in (0, -1))
    shrinks = ladder.slope > 0
    word, per_block = "shrinks" if shrinks else "grows", phrases.number(float(np.exp(abs(ladder.slope))))
    weak = first if shrinks else last
    step = int(frame.steps[rows[-1]])
    picked = np.unique(np.linspace(0, len(ladder.columns) - 1, phrases.EVIDENCE_ROWS).round().astype(int))
    evidence = [
        Evidence(
            f"series/gradient/rms/{frame.names[int(ladder.columns[i])]}",
            step,
            float(medians[i]),
            "gradient, median over steps",
        )
        for i in picked
    ]
    yield Finding(
        severity=Severity.WARNING,
        title=f"The gradient {word} {phrases.number(ladder.fold)}-fold towards the input",
        detail=(
            f"The rms changes by a factor of {per_block} per block over the "
            f"{len(ladder.columns)} weights `{ladder.title}`: from {phrases.number(medians[-1])} in "
            f"`{last}` to {phrases.number(medians[0])} in `{first}` (R² {ladder.explained:.2f}; "
            f"{100 * ladder.agreement:.0f} % of the steps agree). Affected: "
            f"{phrases.share(len(found), evaluated, 'comparable stacks')}."
        ),
        subject=Subject(
            parameter=weak, module=phrases.modules_of(run).get(weak), step=int(frame.steps[rows[0]])
        ),
        evidence=tuple(evidence),
        fix=(
            "Use an initialisation that preserves variance (He for ReLU, Xavier for tanh), residual "
            "connections, or a normalisation before every block."
            if shrinks
            else "Use a smaller initial scale of the blocks, a normalisation before every block, or residual "
            "branches scaled by 1/sqrt(depth)."
        ),
        refuted_if=(
            "the blocks differ in width, learning rate or input by design, or the slope vanishes in later "
            "steps."
        ),
    )


def _ladders(records: tuple[ParameterRecord, ...], names: tuple[str, ...], blocks: int) -> Iterator[_Ladder]:
    """Group weight matrices that differ in one number of their name; without any, by order and shape."""
    column = {name: i for i, name in enumerate(names)}
    matrices = [
        p for p in records if len(p.shape) >= 2 and p.name in column and "Embedding" not in p.module_type
    ]
    numbered: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, ParameterRecord]]] = {}
    for record in matrices:
        for match in re.finditer(r"\d+", record.name):
            title = f"{record.name[: match.start()]}#{record.name[match.end() :]}"
            key = (title, record.module_type, record.shape)
            numbered.setdefault(key, []).append((int(match.group()), record))
    found = False
    for (title, _, _), rungs in numbered.items():
        if len(rungs) >= blocks and len({number for number, _ in rungs}) == len(rungs):
            rungs.sort(key=lambda rung: rung[0])
            # Blocks of a Sequential are numbered with gaps (activations between): the rank is the depth.
            columns = np.array([column[p.name] for _, p in rungs])
            yield _Ladder(title, columns, np.arange(len(rungs), dtype=float))
            found = True
    if found:
        return
    ordered: dict[tuple[str, tuple[int, ...]], list[ParameterRecord]] = {}
    for record in matrices:
        ordered.setdefault((record.module_type, record.shape), []).append(record)
    for (kind, shape), group in ordered.items():
        if len(group) >= blocks:
            title = f"of type {kind or 'unknown'} and shape {'x'.join(map(str, shape))} in model order"
            columns = np.array([column[p.name] for p in group])
            yield _Ladder(title, columns, np.arange(len(group), dtype=float))


def _fit(
    title: str, columns: NDArray[np.int64], x_L: NDArray[np.float64], logs_KP: NDArray[np.float64]
) -> _Ladder:
    """Fit the medians over steps by Theil and Sen: the median of the slopes of all pairs."""
    logs_KL = logs_KP[:, columns]
    y_L = np.nanmedian(logs_KL, axis=0)
    i, j = np.triu_indices(len(x_L), k=1)
    slope = float(np.median((y_L[j] - y_L[i]) / (x_L[j] - x_L[i])))
    residual = y_L - slope * x_L
    residual = residual - np.median(residual)
    spread = y_L - y_L.mean()
    explained = 1.0 - float(residual @ residual) / max(float(spread @ spread), 1e-30)
    whole_K = np.isfinite(logs_KL).all(axis=1)
    agreement = 1.0
    if whole_K.any():
        centred = x_L - x_L.mean()
        slopes_K = logs_KL[whole_K] @ centred / float(centred @ centred)
        agreement = float(np.mean((slopes_K * np.sign(slope)) >= abs(slope) / 2))
    return _Ladder(title, columns, x_L, slope, explained, agreement)
