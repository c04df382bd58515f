"""Panels of the whole model and its ranks: loss, norm, updates, learning rate, loss scale, health."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.findings.losses import losses_of
from backlight.findings.recorded_steps import optimizer_sets
from backlight.monitors.health.model.score import clip_factors
from backlight.report.charts import Axis, Line, chart, clipped_top, constant, spans_decades
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, PanelFact, panel, stated
from backlight.report.source import Source, rate_labels
from backlight.store.format.schema import THINNED
from backlight.store.read.run import Scalar, Spread
from backlight.text import count, number, percent, score


def summary(source: Source) -> MonitorSummary:
    """Return the summary of the gradients, also where none was measured."""
    steps, seen, amount = len(source.coverage.steps), int(source.coverage.measured.sum()), _amount(source)
    if not seen:
        return MonitorSummary(
            source.reason("gradient", otherwise="No gradient was recorded."), _figures, False
        )
    of = f"all {amount:,}" if seen == amount else f"{seen:,} of {amount:,}"
    which = "the one parameter" if seen == amount == 1 else f"{of} parameters"
    return MonitorSummary(f"Gradients of {which} {_coverage(source, steps)}.", _figures)


def _coverage(source: Source, steps: int) -> str:
    """Return at how many of the steps that the run took gradients were measured, and the loss."""
    coverage = source.run.coverage()
    taken, losses = coverage.taken, coverage.with_loss
    fewest = source.coverage.fewest
    is_one = len(np.unique(optimizer_sets(source.run, source.coverage.steps))) == 1
    whole = count(taken, "step" if is_one else "optimizer step")
    labels = [*losses_of(source.run)]
    word = "the loss" if labels in ([], ["loss"]) else "losses" if len(labels) > 1 else f"the {labels[0]}"
    if fewest == steps == losses == taken:
        return f"and {word} were measured at all {whole}"
    at = f"{steps:,}" if fewest == steps else f"{fewest:,} to {steps:,}"
    of = f"all {whole}" if fewest == steps == taken else f"{at} of {whole}"
    loss = "" if not losses else f", {word} at {'every step' if losses == taken else f'{losses:,}'}"
    return f"were measured at {of}{loss}"


def _amount(source: Source) -> int:
    """Return how many parameters could be measured: those of the model, and others that have gradients."""
    return sum(
        record.in_model or bool(measured)
        for record, measured in zip(source.parameters, source.coverage.measured, strict=True)
    )


def _figures(source: Source) -> Figures:
    steps = source.coverage.steps
    broken = source.frames.stats.get("non_finite_sum", np.empty(0))
    ill_count = number(int((np.nan_to_num(broken) > 0).sum())) if len(broken) else "not measured"
    worst, meaning = "not measured", "1 is the best, 0 the worst"
    if source.untrained:
        meaning = f"{count(len(source.untrained), 'parameter')} never trained"
    elif source.health is not None and not np.isnan(source.health[1]).all():
        worst = score(float(np.nanmin(source.health[1])))
    lasts = [
        (f"last {label}", number(float(scalar.values[-1])), f"at step {number(int(scalar.steps[-1]))}")
        for label, scalar in losses_of(source.run).items()
    ]
    of = f"of {number(_amount(source))}"
    taken = f"of {number(source.run.last_step() + 1)}"
    if thinned := source.run.events("stored_steps"):
        taken += f"; from step {number(thinned[0].step or 0)} on one of each window, and what stands out"
    return (
        ("steps recorded", number(len(steps)), taken),
        ("parameters measured", number(int(source.coverage.measured.sum())), of),
        ("lowest health", worst, meaning),
        ("with NaN or Inf", ill_count, "parameters"),
        *(lasts or [("last loss", "not measured", "")]),
    )


def checked(_source: Source) -> str:
    """Return what the rules on gradients look at."""
    return "gradients and updates: missing, vanishing, exploding, not finite, clipped, too large or small"


@panel(
    "loss",
    title="Loss",
    order=10,
    series=("scalars/loss",),
    monitor="health",
    place="half",
    summary=summary,
    checked=checked,
)
def loss(source: Source) -> Drawn | NotMeasured:
    """Draw the recorded loss."""
    losses, recorded = losses_of(source.run), source.scalar("loss").steps
    if not losses:
        return NotMeasured(source.reason("loss", otherwise="No backward pass gave a loss."))
    is_one = len(losses) == 1
    lines = [
        Line(label, scalar.steps, scalar.values, tone="loss" if is_one else "", recorded=recorded)
        for label, scalar in losses.items()
    ]
    remarks: tuple[str, ...] = ()
    if thinned := source.run.events(THINNED):
        before, steps = (thinned[-1].payload[name] for name in ("before", "every"))
        remarks = (
            f"Before step {before:,}, a point is the mean of up to {steps:,} steps"
            + (", and the band is from the least to the greatest of them." if is_one else "."),
        )
        if is_one:
            least, greatest = (source.run.scalar("loss", bound) for bound in ("minimum", "maximum"))
            lines += [
                Line("greatest", greatest.steps, greatest.values, style="edge", tone="loss", down_to="least"),
                Line("least", least.steps, least.values, style="edge", tone="loss"),
            ]
    (unit,) = losses if is_one else ("loss",)
    log = spans_decades(*(scalar.values for scalar in losses.values()))
    drawn = chart(lines, Axis(unit, log=log), adjustable=True)
    facts = [
        PanelFact(
            "first to last" if is_one else f"{label}, first to last",
            f"{number(scalar.values[0])} to {number(scalar.values[-1])}",
        )
        for label, scalar in losses.items()
    ]
    return Drawn("lines", {"charts": [drawn]}, tuple(facts), remarks)


@panel(
    "total_norm",
    title="Gradient norm",
    order=20,
    series=("scalars/total_norm", "scalars/clip", "events/clip_by_hand", "events/clip_by_value"),
    note="L2 norm over all parameters, each tensor once, before clipping.",
    monitor="health",
    place="half",
)
def total_norm(source: Source) -> Drawn | NotMeasured:
    """Draw the total norm with the clip limit."""
    norm = source.scalar("total_norm")
    clipped, limit = source.scalar("clip/norm"), source.scalar("clip/limit")
    if not len(norm.steps):
        return NotMeasured(source.reason("total_norm", "gradient", otherwise="No gradient was recorded."))
    steps, values = norm.steps, norm.values
    same = len(clipped.steps) > 0 and _same(norm, clipped)
    if same:  # at every step, where the norm of recorded gradients is a sample
        steps, first = np.unique(np.concatenate([steps, clipped.steps]), return_index=True)
        values = np.concatenate([values, clipped.values])[first]
    lines = [Line("total norm", steps, values, tone="first")]
    if len(clipped.steps) and not same:
        # Clipping may be called for a part of the parameters, or by another L-p norm.
        lines.append(Line("norm that clipping computed", clipped.steps, clipped.values, tone="second"))
    _, factors = clip_factors(source.run)
    active = int(np.count_nonzero(factors < 1))
    if len(limit.steps) and active:
        rows = np.maximum(np.searchsorted(limit.steps, steps, "right") - 1, 0)
        lines.append(Line("clip limit", steps, limit.values[rows], style="dashed", tone="limit"))
    drawn = chart(lines, Axis("norm (gradient)", log=True))
    facts = []
    finite = np.isfinite(values)
    if finite.any():
        top = int(np.argmax(np.where(finite, values, -np.inf)))
        facts.append(PanelFact("median", number(float(np.median(values[finite])))))
        facts.append(PanelFact("largest", f"{number(values[top])} at step {number(int(steps[top]))}"))
    if not finite.all():
        facts.append(PanelFact("not finite", f"{int((~finite).sum()):,} of {len(finite):,} steps"))
    if active:
        share = percent(active / len(factors))
        facts.append(PanelFact("clipped", f"{share} ({active:,} of {count(len(factors), 'step')})"))
        facts.append(PanelFact("strongest factor", number(float(factors.min()))))
    elif len(factors):
        at = f", limit {number(float(limit.values[-1]))}" if len(limit.steps) else ""
        facts.append(PanelFact("clipped", f"never{at}"))
    by_hand = len(source.run.events("clip_by_hand"))
    remarks = (
        (f"Gradients were changed by hand between backward and step {by_hand:,} times.",) if by_hand else ()
    )
    return Drawn("lines", {"charts": [drawn]}, tuple(facts), remarks)


def _same(scalar: Scalar, other: Scalar) -> bool:
    """Return whether two scalars agree wherever both were recorded, to the precision of fp32."""
    _, here, there = np.intersect1d(scalar.steps, other.steps, return_indices=True)
    return bool(np.allclose(scalar.values[here], other.values[there], rtol=1e-4, equal_nan=True))


AT_ALL = " at every recorded step."
"""Ends the line of text about values that never changed."""

MAX_LINES = 8
"""Lines that one chart can tell apart."""


@panel(
    "updates",
    title="Update to weight",
    order=40,
    series=("series/update",),
    note="Norm of an optimizer step over the norm of the weights before it, across parameters; of a large "
    "tensor a fixed sample is measured.",
    monitor="health",
    place="half",
)
def updates(source: Source) -> Drawn | NotMeasured:
    """Draw the spread of the update ratio over the parameters."""
    spread = source.frames.ratio_spread
    if spread is None or not np.isfinite(spread).any():
        return NotMeasured(source.reason("update", "ratio", otherwise="No update was recorded."))
    steps = source.frames.steps["update"]
    lines = [
        Line("largest", steps, spread[4], tone="fourth", gaps=True),
        Line("middle 80 %", steps, spread[3], style="edge", tone="first", down_to="lower tenth", gaps=True),
        Line("lower tenth", steps, spread[1], style="edge", tone="first", gaps=True),
        Line("median", steps, spread[2], tone="first", gaps=True),
    ]
    facts = [PanelFact("median", number(float(np.nanmedian(spread[2]))))]
    moved = source.run.frame("update", "update_norm")
    still = np.count_nonzero(moved.measured.any(axis=0) & ~(moved.measured & (moved.values != 0)).any(axis=0))
    if still:
        facts.append(PanelFact("parameters that never moved", number(int(still))))
    return Drawn("lines", {"charts": [chart(lines, Axis("update / weight", log=True))]}, tuple(facts))


@panel(
    "learning_rates",
    title="Learning rate",
    order=42,
    series=("scalars/lr",),
    monitor="health",
    place="half",
)
def learning_rates(source: Source) -> Drawn | NotMeasured:
    """Draw one line per optimizer and group; groups with the same rate at every step share a line."""
    rates = {name: source.scalar(name) for name in source.scalar_names("lr")}
    rates = {name: rate for name, rate in rates.items() if len(rate.steps)}
    if not rates:
        return NotMeasured(source.reason("lr", otherwise="No optimizer with a learning rate was recorded."))
    labels = rate_labels(source.run, list(rates))
    alike: dict[bytes, list[str]] = {}
    for name, rate in rates.items():
        alike.setdefault(rate.steps.tobytes() + rate.values.tobytes(), []).append(name)
    lines = []
    for names in list(alike.values())[:MAX_LINES]:
        label = labels[names[0]] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        lines.append(Line(label, rates[names[0]].steps, rates[names[0]].values, style="steps"))
    remarks: tuple[str, ...] = ()
    if len(alike) > MAX_LINES:
        remarks = (f"{len(alike)} different schedules were recorded; the first {MAX_LINES} are drawn.",)
    if len(alike) <= MAX_LINES and all(constant(line.values) is not None for line in lines):
        return stated("; ".join(f"{line.label}: {number(float(line.values[0]))}" for line in lines) + AT_ALL)
    log = spans_decades(*(line.values for line in lines), factor=1000.0)
    high = max(float(np.nanmax(line.values)) for line in lines)
    axis = Axis("learning rate", log=log, low=None if log or high <= 0 else 0.0)
    return Drawn("lines", {"charts": [chart(lines, axis)]}, (), remarks)


@panel(
    "loss_scale",
    title="Loss scale",
    order=44,
    series=("scalars/scaler", "events/scaler_skip"),
    note="All gradients on this page are divided by it.",
    monitor="health",
    optional=True,
    place="half",
)
def loss_scale(source: Source) -> Drawn | NotMeasured:
    """Draw the scale of a gradient scaler, with the steps that it skipped."""
    scale, skipped = source.scalar("scaler/scale"), source.scalar("scaler/skipped")
    if not len(scale.steps):
        return NotMeasured(source.reason("scaler", otherwise="No gradient scaler was used."))
    at = skipped.steps[skipped.values > 0]
    facts = [PanelFact("first to last", f"{number(scale.values[0])} to {number(scale.values[-1])}")]
    if len(skipped.steps):
        share = percent(len(at) / len(skipped.steps))
        facts.append(
            PanelFact("skipped steps", f"{share} ({len(at):,} of {count(len(skipped.steps), 'step')})")
        )
    if not len(at) and (value := constant(scale.values)) is not None:
        return stated(f"{number(value)}{AT_ALL[:-1]}; no step was skipped.")
    lines = [Line("scale", scale.steps, scale.values, style="steps", tone="first")]
    axis = Axis("loss scale", log=bool(np.all(scale.values > 0)), base=2)
    return Drawn("lines", {"charts": [chart(lines, axis, marks={"skipped step": at})]}, tuple(facts))


@panel(
    "health",
    title="Health",
    order=46,
    series=("scalars/health", "health"),
    note="1 where no parameter vanishes or explodes, 0 where a gradient holds NaN or Inf.",
    monitor="health",
    place="half",
)
def health(source: Source) -> Drawn | NotMeasured:
    """Draw the health score that the caller computed."""
    steps, values = source.health or (np.empty(0, np.int64), np.empty(0))
    scored = ~np.isnan(values)
    if not scored.any():
        return NotMeasured(source.reason("health", "gradient", otherwise="No gradient was recorded."))
    if len(same := {score(value) for value in values[scored]}) == 1:
        about = f" {source.untrained_text}." if source.untrained else ""
        return stated(f"{same.pop()} (0 is the worst, 1 the best){AT_ALL}{about}")
    worst = int(np.nanargmin(values))
    at = "" if values[worst] == np.nanmax(values) else f" at step {number(int(steps[worst]))}"
    others = " of the others" if source.untrained else ""
    facts = (
        PanelFact(f"lowest{others}", score(values[worst]) + at),
        PanelFact(f"at the end{others}", score(values[scored][-1])),
    )
    remarks = []
    if source.untrained:
        remarks.append(f"{source.untrained_text}.")
    if not scored.all():
        remarks.append(f"Health was not measured at {number(int((~scored).sum()))} of the steps.")
    line = Line("health", steps, values, tone="health", gaps=True)
    return Drawn(
        "lines", {"charts": [chart([line], Axis("health", low=0.0, high=1.0))]}, facts, tuple(remarks)
    )


LINES = 8
"""Ranks with a line each; of more, the lowest, the median and the highest are drawn."""

FACTS = 16


@panel(
    "ranks",
    title="Ranks",
    order=70,
    series=("ranks",),
    note=(
        "What each process saw by itself: the loss of its part of the batch, the norm of the gradients "
        "that it holds, the time between its steps."
    ),
    optional=True,
)
def ranks(source: Source) -> Drawn | NotMeasured:
    """Draw the spread over ranks, where there are several."""
    run = source.run
    states = run.ranks()
    if len(states) < 2:
        return NotMeasured("One process trained.")
    charts = []
    between = _between(run.spread("time"))
    longest = np.nanmax(between.values, axis=1, initial=-np.inf)
    seconds = Axis("s", low=0.0, top=clipped_top(between.steps, longest, source.cold_steps))
    for spread, title, axis in (
        (run.spread("loss"), "Loss of each rank", Axis("loss")),
        (run.spread("total_norm"), "Norm of what each rank holds", Axis("norm (gradient)", log=True)),
        (between, "Time between steps", seconds),
    ):
        if len(spread.ranks) > 1 and len(spread.steps):
            charts.append(chart(_lines(spread), axis, title=title))
    if not charts:
        return NotMeasured("No number was recorded by more than one rank.")
    facts = [PanelFact("ranks", str(len(states)))]
    last = max(state.last_step for state in states)
    for state in [s for s in states if s.status.value != "finished" or s.last_step < last][:FACTS]:
        after = f"after step {number(state.last_step)}" if state.last_step >= 0 else "before its first step"
        facts.append(PanelFact(f"rank {state.rank}", f"{state.status.value} {after}"))
    remarks = []
    ill = run.spread("loss").first_non_finite()
    if ill is not None:
        step, who = ill
        named = ", ".join(map(str, who[:FACTS]))
        remarks.append(f"The first loss that is not finite is at step {step}, on rank {named}.")
    if any(len(spread.ranks) > LINES for spread in (run.spread("loss"), run.spread("total_norm"))):
        remarks.append(
            "Of so many ranks the lowest, the median and the highest value are drawn at each step."
        )
    data: dict[str, Any] = {"charts": charts, "small": True}
    return Drawn("lines", data, tuple(facts), tuple(remarks))


def _lines(spread: Spread) -> list[Line]:
    if len(spread.ranks) <= LINES:
        return [
            Line(f"rank {rank}", spread.steps, spread.values[:, r], gaps=True)
            for r, rank in enumerate(spread.ranks)
        ]
    rows = np.isfinite(spread.values).any(axis=1)
    steps, values = spread.steps[rows], np.where(np.isfinite(spread.values), spread.values, np.nan)[rows]
    kinds: tuple[tuple[str, NDArray[np.float64]], ...] = (
        ("lowest", np.nanmin(values, axis=1)),
        ("median", np.nanmedian(values, axis=1)),
        ("highest", np.nanmax(values, axis=1)),
    )
    return [Line(label, steps, line) for label, line in kinds]


def _between(times: Spread) -> Spread:
    """Return seconds per step from the times at which steps ended, spread evenly over steps between."""
    if len(times.steps) < 2:
        return Spread((), times.steps[:0], times.values[:0, :0], times.logged[:0, :0], "s")
    values = np.diff(times.values, axis=0) / np.diff(times.steps)[:, None]
    return Spread(times.ranks, times.steps[1:], values, ~np.isnan(values), "s")
