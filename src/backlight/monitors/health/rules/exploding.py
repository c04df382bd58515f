"""Rule ``exploding``: gradients that leave their own past by orders of magnitude and stay there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import limit
from backlight.findings.recorded_steps import step_weights, weighted_median, weighted_share, work_of
from backlight.monitors.health.model.history import (
    StretchLimits,
    medians_outrun,
    more_than_before,
    present,
    stretches,
)
from backlight.monitors.health.model.score import (
    ExplodingMaskLimits,
    clip_norms,
    outrun,
    total_norms,
)
from backlight.monitors.health.model.score import exploding as exploding_mask
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run
from backlight.text import count


@dataclass(frozen=True)
class ExplodingLimits(ExplodingMaskLimits, StretchLimits):
    """Limits of the rule ``exploding``."""

    exploding_steps: int = limit(
        3,
        "recorded steps at which a parameter must explode; fewer are a spike, which has its own rule",
        low=1,
    )
    exploding_norm: float = limit(
        1e8,
        "a total norm above it at most steps is no usual one, whatever came before: losses that are means "
        "have norms of about 1, sums over a million terms 1e6",
    )


@rule(
    "exploding", monitor="health", limits=ExplodingLimits, needs=("gradient",), is_statistic=True,
    explained_by=(
        "gradients_not_cleared", "large_update", "mixed_precision", "module_modes", "weights_changed",
    ),
)  # fmt: skip
def exploding(run: Run, limits: ExplodingLimits) -> Iterator[Finding]:
    """Find parameters, else the total norm, that explode for several steps or right up to Inf or NaN.

    Vectors alone are a hint: the gradient of a bias before a batch norm is a sum that cancels, and no longer
    does where the batch norm is in evaluation mode.
    """
    frame = run.frame("gradient", "rms")
    columns, medians_SC = outrun(present(frame.values, frame.measured), limits)
    work_S = work_of(run, frame.steps)
    medians_SC = medians_SC * more_than_before(work_S, limits.history_window)[:, None]
    part = dataclasses.replace(
        frame,
        names=tuple(frame.names[c] for c in columns),
        values=frame.values[:, columns],
        measured=frame.measured[:, columns],
        any_rank=None,
    )
    rms_SC = np.where(part.measured, part.values, np.nan)
    hits_SC = exploding_mask(rms_SC, part.measured, medians_SC, limits) & np.isfinite(rms_SC)
    begins, is_broken = {}, False
    for column in np.flatnonzero(hits_SC.any(axis=0)):
        per_work_S = rms_SC[:, column] / work_S
        lasting = _lasting(hits_SC[:, column], per_work_S, part.measured[:, column], limits)
        if lasting is not None:
            begins[int(column)] = lasting[0]
            is_broken = is_broken or lasting[1]
    if begins:
        yield _of_parameters(run, part, medians_SC, hits_SC, begins, limits, is_broken=is_broken)
        return
    for find in (_of_total, _huge):
        yield from find(run, frame, limits)


def _lasting(
    hits_S: np.ndarray, rms_S: np.ndarray, measured_S: np.ndarray, limits: ExplodingLimits
) -> tuple[int, bool] | None:
    """Return the row at which a lasting explosion begins, and whether it breaks the run; None without one.

    It does where it ends in NaN or Inf, or goes on to grow by as much as it began with. Both stay true
    whatever follows: a run that goes on is evaluated as it will be at its end.
    """
    rows = np.flatnonzero(measured_S)
    places = np.flatnonzero(hits_S[rows])
    for stretch in stretches(places, limits.spike_gap):
        following = stretch[-1] + 1
        broken = following < len(rows) and not np.isfinite(rms_S[rows[following]])
        before, during = rms_S[rows[: stretch[0]]], rms_S[rows[stretch]]
        # A task that was nearly solved has small gradients; they return to their usual size with its errors.
        returns = np.nanmax(during) <= np.nanmax(np.where(np.isfinite(before), before, 0.0), initial=0.0)
        if broken or (len(stretch) >= limits.exploding_steps and not returns):
            grows = np.nanmax(during) > limits.exploding_factor * during[0]
            return int(rows[stretch[0]]), bool(broken or grows)
    return None


def _of_parameters(
    run: Run,
    frame: Frame,
    medians_SP: np.ndarray,
    hits_SP: np.ndarray,
    begins: dict[int, int],
    limits: ExplodingLimits,
    *,
    is_broken: bool,
) -> Finding:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios_SP = np.where(hits_SP, frame.values / medians_SP, 0.0)
    peaks = {c: int(np.argmax(ratios_SP[:, c])) for c in begins}
    order = phrases.loudest(begins, lambda c: float(ratios_SP[peaks[c], c]))
    worst = order[0]
    row, name = peaks[worst], frame.names[worst]
    step, begin = int(frame.steps[row]), int(frame.steps[begins[worst]])
    finite = np.flatnonzero(np.isfinite(frame.values[:, worst]) & frame.measured[:, worst])
    still_high = frame.values[finite[-1], worst] > limits.exploding_factor * medians_SP[begins[worst], worst]
    shapes = {p.name: p.shape for p in run.parameters()}
    if not any(len(shapes[frame.names[c]]) >= 2 for c in begins):
        severity = Severity.INFO
    else:
        severity = Severity.ERROR if is_broken else Severity.WARNING
    evidence = [
        phrases.series("gradient/rms", frame.names[c], int(frame.steps[peaks[c]]), frame.values[peaks[c], c])
        for c in order
    ]
    evidence.append(
        Evidence(
            f"series/gradient/rms/{name}", begin, float(medians_SP[begins[worst], worst]), "running median"
        )
    )
    return Finding(
        severity=severity,
        title=(
            f"{phrases.gradient_of([frame.names[c] for c in order], len(begins))} "
            f"explode{'s' if len(begins) == 1 else ''} from step {begin}"
        ),
        detail=(
            f"The rms of `{name}` reaches {phrases.number(frame.values[row, worst])} at step {step}, "
            f"{phrases.number(ratios_SP[row, worst])} times its running median of "
            f"{phrases.number(medians_SP[row, worst])}, "
            + ("and stays there up to the last finite step." if still_high else "and falls back later.")
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=begin),
        evidence=tuple(evidence),
        fix=(
            f"Resume from a checkpoint before step {begin} with a tenth of the learning rate, or clip: "
            "`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`."
        ),
        refuted_if=(
            f"`{name}` was hardly used before (an expert, a branch, an embedding), so its later size is "
            "normal."
        ),
    )


def _of_total(run: Run, frame: Frame, limits: ExplodingLimits) -> Iterator[Finding]:
    """Compare the total norm with the clip norm and, since many clip low, with its own past."""
    norms_S, clips_S = total_norms(run, frame.steps), clip_norms(run, frame.steps)
    factor = limits.exploding_clip_factor
    columns, medians_SC = medians_outrun(
        norms_S[:, None], limits.history_window, limits.history_refresh, limits.history_minimum, factor
    )
    if not len(columns):
        return
    work_S = more_than_before(work_of(run, frame.steps), limits.history_window)
    medians_S = medians_SC[:, 0] * work_S
    with np.errstate(invalid="ignore"):
        hits_S = np.isfinite(norms_S) & (norms_S > factor * clips_S) & (norms_S > factor * medians_S)
    for stretch in stretches(np.flatnonzero(hits_S), limits.spike_gap):
        if len(stretch) < limits.exploding_steps:
            continue
        row = int(stretch[np.argmax(norms_S[stretch])])
        step, begin = int(frame.steps[row]), int(frame.steps[stretch[0]])
        yield Finding(
            severity=Severity.WARNING,
            title=f"The total gradient norm explodes from step {begin}",
            detail=(
                f"It is {phrases.number(norms_S[row])} at step {step}, "
                f"{phrases.number(norms_S[row] / clips_S[row])} times the clip norm of "
                f"{phrases.number(clips_S[row])} and {phrases.number(norms_S[row] / medians_S[row])} times "
                f"its running median, at {count(len(stretch), 'recorded step')}. Clipping hides it "
                "from the weights."
            ),
            subject=Subject(step=begin),
            evidence=(
                phrases.total_norm(run, step, norms_S[row]),
                phrases.scalar("clip/limit", step, clips_S[row], "gradient"),
            ),
            fix=(
                f"Look in the heat map for the parameters that carry the norm at step {step}, and at its "
                "batches."
            ),
            refuted_if="the clip norm or the scale of the loss was changed on purpose at that step.",
        )
        return


def _huge(run: Run, frame: Frame, limits: ExplodingLimits) -> Iterator[Finding]:
    """Find a total norm that is huge at most steps: there is no past that it could have left."""
    norms_S = total_norms(run, frame.steps)
    finite_S = np.isfinite(norms_S)
    steps, norms = frame.steps[finite_S], norms_S[finite_S]
    weights = step_weights(steps)
    above = norms > limits.exploding_norm
    if above.sum() < limits.exploding_steps or weighted_share(above, weights) <= 0.5:
        return
    median = weighted_median(norms, weights)
    row = int(np.argmin(np.abs(norms - median)))
    step = int(steps[row])
    yield Finding(
        severity=Severity.WARNING,
        title=f"The total gradient norm is {phrases.number(median)}",
        detail=(
            f"That is its median over the run; it exceeds {phrases.number(limits.exploding_norm)} at "
            f"{phrases.share(int(above.sum()), len(steps), 'recorded steps')}. Squares of such gradients, as "
            "Adam keeps them, lose small values to rounding, and a step of SGD is as long as the norm."
        ),
        subject=Subject(step=int(steps[np.argmax(above)])),
        evidence=(phrases.total_norm(run, step, norms[row]),),
        fix=(
            "Look for the factor: inputs or targets that are not normalised, a loss that is summed over the "
            "batch, a division by a number near 0."
        ),
        refuted_if="the loss is a sum over very many terms on purpose, and is trained with Adam or clipping.",
    )
