"""A curve as inline SVG: no script, no style sheet, colours of the page around it."""

from __future__ import annotations

import html

import numpy as np
import numpy.typing as npt

from backlight.text import number, visible

WIDTH, HEIGHT = 340, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 20, 18

POINTS = 400
"""Points that are drawn at most; of each stretch the lowest and the highest stay."""


def curve(
    title: str,
    steps: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    unit: str = "",
    log: bool = False,
) -> str:
    """Return an SVG of ``values`` over ``steps``; what is not finite is a gap, and is counted in the title.

    A logarithmic axis is used where it is asked for and every finite value is positive.
    """
    finite = np.isfinite(values)
    head = visible(title) + (f" ({visible(unit)})" if unit and unit not in {title, "1"} else "")
    if not finite.all():
        head += f", {int((~finite).sum()):,} not finite"
    if not finite.any():
        return _svg(head, _text(_LEFT, HEIGHT / 2, "no finite value", 0.6))
    log = log and bool((values[finite] > 0).all())
    drawn = np.log10(np.where(finite, values, 1.0)) if log else np.where(finite, values, 0.0)
    low, high = float(drawn[finite].min()), float(drawn[finite].max())
    span = high - low or 1.0
    first, last = float(steps[0]), float(steps[-1])
    kept = _kept(drawn, finite)
    x = _LEFT + (steps[kept] - first) / (last - first or 1.0) * (WIDTH - _LEFT - _RIGHT)
    y = HEIGHT - _BOTTOM - (drawn[kept] - low) / span * (HEIGHT - _TOP - _BOTTOM)
    parts = []
    for stretch in np.split(np.arange(len(kept)), np.flatnonzero(~finite[kept])):
        there = [i for i in stretch.tolist() if finite[kept[i]]]
        if len(there) == 1:
            parts.append(
                f'<circle cx="{x[there[0]]:.1f}" cy="{y[there[0]]:.1f}" r="1.5" fill="currentColor"/>'
            )
        elif there:
            points = " ".join(f"{x[i]:.1f},{y[i]:.1f}" for i in there)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.4"/>'
            )
    frame = (
        f'<path d="M{_LEFT} {_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.35"/>'
    )
    top, bottom = (10**high, 10**low) if log else (high, low)
    labels = [
        _text(_LEFT - 4, _TOP + 8, number(top, 3), 0.75, "end"),
        _text(_LEFT - 4, HEIGHT - _BOTTOM, number(bottom, 3), 0.75, "end"),
        _text(_LEFT, HEIGHT - 5, f"step {number(int(first))}", 0.75),
        _text(WIDTH - _RIGHT, HEIGHT - 5, number(int(last)), 0.75, "end"),
    ]
    return _svg(head + (", log" if log else ""), "".join([frame, *parts, *labels]))


def _kept(drawn: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return which points are drawn: all, or the lowest and highest of each stretch and one of its gaps."""
    if len(drawn) <= POINTS:
        return np.arange(len(drawn))
    chosen = {0, len(drawn) - 1}
    for stretch in np.array_split(np.arange(len(drawn)), POINTS // 2):
        inner = stretch[finite[stretch]]
        if inner.size:
            chosen |= {int(inner[np.argmin(drawn[inner])]), int(inner[np.argmax(drawn[inner])])}
        if inner.size < stretch.size:
            chosen.add(int(stretch[~finite[stretch]][0]))
    return np.array(sorted(chosen), dtype=np.int64)


def _text(x: float, y: float, text: str, opacity: float, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="10" fill="currentColor" '
        f'fill-opacity="{opacity}">{html.escape(text)}</text>'
    )


def _svg(head: str, inside: str) -> str:
    label = html.escape(head, quote=True)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif">{_text(_LEFT, 12, head, 1.0)}{inside}</svg>'
    )
