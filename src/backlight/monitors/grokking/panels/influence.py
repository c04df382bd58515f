"""Panels of grokking on single samples: which carry the drop of the held-out loss, and the tangent kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.panels.learning_curves import lines_of, scaled, spans
from backlight.report.charts import Axis, chart
from backlight.report.panel import Drawn, NotMeasured, PanelFact, panel
from backlight.report.source import Source
from backlight.store.read.run import Run
from backlight.text import number

LISTED = 8
"""Samples of either sign that are listed."""

NO_HELD_OUT = "No held-out batch was given: watch(..., samples=(loss_fn, batch, held_out))."


def summed_influences(run: Run, array: str = "influence/samples") -> NDArray[np.float64] | None:
    """Return the influence of each sample of a fixed probe batch, summed over the steps of the run, ``[N]``.

    Of ``influence/pairs`` it is ``[N, M]``, on each of the first held-out samples. Between two measured steps
    it is interpolated. None where it was measured at fewer than two steps, or the batch changes from one to
    the next.
    """
    announced = run.events("influence")
    if not announced or not all(event.payload.get("is_fixed") is True for event in announced):
        return None
    if array not in run.array_names():
        return None
    steps, values = run.array(array)
    if len(steps) < 2 or len({value.shape for value in values}) > 1:
        return None
    total: NDArray[np.float64] = np.trapezoid(np.stack(values).astype(np.float64), steps, axis=0)
    return total


@panel(
    "influence",
    title="Samples that lower the held-out loss",
    order=14,
    series=("scalars/influence", "arrays/influence"),
    note="To first order, what each sample of the probe batch contributes to a drop of the mean held-out "
    "loss, for a step of gradient descent on this batch at the learning rates of the optimizer (TracIn). "
    "Adam and others take other steps: there samples are ranked, drops are not predicted.",
    monitor="grokking",
)
def influence(source: Source) -> Drawn | NotMeasured:
    """Draw drop and held-out loss over steps, and list the samples with the largest sums."""
    marked = spans(source)
    drop = lines_of(
        source,
        (
            ("influence/drop", "drop per step"),
            ("influence/lowering", "of samples that lower it"),
            ("influence/raising", "of samples that raise it"),
        ),
    )
    if not drop:
        return NotMeasured(source.reason("influence", otherwise=NO_HELD_OUT))
    charts = [chart(drop, Axis("drop per step"), title="Predicted drop", spans=marked)]
    loss = lines_of(source, (("influence/held_out_loss", "held-out loss"),))
    charts.append(chart(loss, scaled(loss, "loss"), title="Held-out loss", spans=marked))
    total = summed_influences(source.run)
    if total is None:
        reason = "The probe batch changes, or was measured once: its samples have no sum over the run."
        return Drawn("lines", {"charts": charts}, (), (reason,))
    names, pairs = _rows(source.run, len(total)), summed_influences(source.run, "influence/pairs")
    facts = _facts(total, names) if pairs is None else (*_facts(total, names), *_pair_facts(pairs, names))
    return Drawn("lines", {"charts": charts}, facts)


def _rows(run: Run, count: int) -> list[int]:
    """Return the numbers of the samples: in the training set where the run states them, else in the batch."""
    events = run.events("grokking")
    rows = events[-1].payload.get("probe_rows") if events else None
    is_stated = isinstance(rows, list) and len(rows) == count and all(isinstance(row, int) for row in rows)
    return rows if isinstance(rows, list) and is_stated else list(range(count))


def _facts(total: NDArray[np.float64], names: Sequence[int]) -> tuple[PanelFact, ...]:
    order = np.argsort(-total, kind="stable")
    lowering, raising = (
        ", ".join(f"{names[n]} ({number(float(total[n]))})" for n in rows if sign * total[n] > 0) or "none"
        for rows, sign in ((order[:LISTED], 1), (order[::-1][:LISTED], -1))
    )
    return (
        PanelFact("samples that lower it most", lowering),
        PanelFact("samples that raise it most", raising),
    )


def _pair_facts(total_NM: NDArray[np.float64], names: Sequence[int]) -> tuple[PanelFact, ...]:
    """Return which samples moved the losses of the held-out samples whose loss moved most."""
    facts = []
    for m in np.argsort(-np.abs(total_NM.sum(0)), kind="stable")[:LISTED]:
        order = np.argsort(-np.abs(total_NM[:, m]), kind="stable")[:3]
        moved = ", ".join(f"{names[n]} ({number(float(-total_NM[n, m]))})" for n in order)
        change = number(float(-total_NM[:, m].sum()))
        facts.append(PanelFact(f"loss of held-out sample {m}", f"moved by {change}, most by {moved}"))
    return tuple(facts)


@panel(
    "tangent_kernel",
    title="Neural tangent kernel",
    order=15,
    series=("scalars/ntk",),
    note="Of the first samples of the probe batch. Alignment: 1 where the kernel is that of the labels "
    "alone. Distance from the first kernel measured: near 0 while the network trains lazily.",
    monitor="grokking",
)
def tangent_kernel(source: Source) -> Drawn | NotMeasured:
    """Draw alignment, distance from the start and trace, each in a chart."""
    charts = []
    for name in ("alignment", "distance", "trace"):
        lines = lines_of(source, ((f"ntk/{name}", name),))
        if lines:
            charts.append(chart(lines, scaled(lines, name), title=name.capitalize(), spans=spans(source)))
    if not charts:
        none = "It is measured on request: watch(..., grokking={'ntk': 10})."
        return NotMeasured(source.reason("ntk", otherwise=none))
    return Drawn("lines", {"charts": charts, "small": True})
