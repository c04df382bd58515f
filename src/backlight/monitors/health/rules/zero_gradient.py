"""Rule ``zero_gradient``: a dead parameter, measured at every step and zero everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.history import Bools, Integers, ending_streaks
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class ZeroLimits(Limits, monitor="health"):
    """Limits of the rule ``zero_gradient``."""

    zero_window: int = limit(
        20,
        "recorded steps up to the end at which every value is zero; zero-initialised branches are alive "
        "after one or two steps",
        low=1,
    )


@rule("zero_gradient", monitor="health", limits=ZeroLimits, needs=("gradient",))
def zero_gradient(run: Run, limits: ZeroLimits) -> Iterator[Finding]:
    """Find parameters whose gradient is exactly zero up to the end of the run."""
    zeros, sizes = run.frame("gradient", "zeros"), run.frame("gradient", "numel")

    def marks(rows: slice, columns: Integers) -> tuple[Bools, Bools]:
        size, zero = sizes.values[rows][:, columns], zeros.values[rows][:, columns]
        measured = zeros.measured[rows][:, columns] & (size > 0)
        return measured & (zero == size), measured

    streaks_P, ever_P = ending_streaks(marks, len(zeros.steps), len(zeros.names), limits.zero_window)
    found = np.flatnonzero(streaks_P >= limits.zero_window)
    if len(found) == 0:
        return
    whole = int(ever_P.sum())
    scalars = {i: int(sizes.values[:, i].max()) for i in found.tolist()}
    order = phrases.loudest(scalars, lambda i: float(scalars[i]))
    worst = order[0]
    name = zeros.names[worst]
    lasts = {i: int(np.flatnonzero(marks(slice(None), np.array([i]))[0][:, 0])[-1]) for i in order}
    rows = np.flatnonzero(zeros.measured[:, worst] & (sizes.values[:, worst] > 0))
    begin = int(rows[-int(streaks_P[worst])])
    since = int(zeros.steps[begin])
    alive_before = begin > rows[0]
    everything = len(found) == whole
    # A vector alone may have no effect by construction, such as a bias before a batch norm; its gradient is
    # exactly zero with some kernels and rounding error with others.
    shapes = {p.name: p.shape for p in run.parameters()}
    vectors = all(len(shapes[zeros.names[i]]) < 2 for i in found)
    history = "earlier it was not" if alive_before else "no recorded step had another value"
    yield Finding(
        severity=Severity.ERROR if everything else Severity.INFO if vectors else Severity.WARNING,
        title=(
            "Every gradient is exactly zero"
            if everything
            else f"{phrases.gradient_of([zeros.names[i] for i in order], len(found))} "
            f"{'is' if len(found) == 1 else 'are'} exactly zero"
        ),
        detail=(
            f"Every value of the gradient of `{name}` ({scalars[worst]} values) is zero in the last "
            f"{int(streaks_P[worst])} recorded steps, since step {since}; {history}. Affected: "
            f"{phrases.share(len(found), whole, 'measured parameters')}."
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=since),
        evidence=tuple(
            Evidence(
                f"series/gradient/zeros/{zeros.names[row]}",
                int(zeros.steps[lasts[row]]),
                int(zeros.values[lasts[row], row]),
                f"zeros of {scalars[row]}",
            )
            for row in order
        ),
        fix=(
            "Check that the loss depends on the output: a margin that is met, a constant target, or a mask "
            "that hides everything."
            if everything
            else f"Check the activations that follow `{name}`: a ReLU that is never positive, a "
            "multiplication by zero (a mask, a gate, an output layer that stays at zero), or an expert "
            "without tokens."
        ),
        refuted_if=f"a recorded step shows a non-zero gradient of `{name}`.",
    )
