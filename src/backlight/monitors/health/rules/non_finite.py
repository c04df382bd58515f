"""Rule ``non_finite``: the first step whose gradients or loss hold NaN or Inf, and where it shows."""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.monitors.health.model.score import skipped_steps, total_norms
from backlight.monitors.health.model.spike_samples import samples_at
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Frame, Run, Scalar

HISTORY = 3
"""Recorded total norms before the event that the evidence shows."""

MAX_RANKS = 16
"""Ranks that are read one by one, at most: of a thousand, the first suffice."""


@rule("non_finite", monitor="health", needs=())
def non_finite(run: Run, limits: Limits) -> Iterator[Finding]:
    """Find the first non-finite gradient, else the first non-finite loss.

    Steps that a gradient scaler skipped are left out: its search for a scale makes Inf on purpose, and
    ``loss_scale`` evaluates how often.
    """
    skipped = skipped_steps(run)
    loss = run.scalar("loss")
    bad_loss = [int(s) for s, v in zip(loss.steps, loss.values, strict=True) if not np.isfinite(v)]
    bad_loss = [step for step in bad_loss if step not in skipped]
    frame, ill_SP, local = _first_ill(run, skipped)
    rows = np.flatnonzero(ill_SP.any(axis=1))
    if len(rows) and not (bad_loss and bad_loss[0] < frame.steps[rows[0]]):
        yield _in_gradients(run, frame, ill_SP, rows, loss, local)
    elif bad_loss:
        value = float(loss.values[np.searchsorted(loss.steps, bad_loss[0])])
        follows = "no recorded gradient holds NaN or Inf."
        if len(rows):
            follows = f"recorded gradients hold NaN or Inf from step {int(frame.steps[rows[0]])} on."
        yield Finding(
            severity=Severity.ERROR,
            title=f"The loss is {phrases.number(value)} from step {bad_loss[0]} on",
            detail=(
                f"It is not finite at {phrases.share(len(bad_loss), len(loss.steps), 'recorded steps')}; "
                f"{follows}"
            ),
            subject=Subject(step=bad_loss[0]),
            evidence=(phrases.scalar("loss", bad_loss[0], value, "loss"),),
            fix=_fix(bad_loss[0]),
            refuted_if=(
                "the loss of that step is finite when it is computed again from the same batch and weights."
            ),
        )


def _first_ill(run: Run, skipped: Set[int]) -> tuple[Frame, np.ndarray, int | None]:
    """Return gradients and where they are not finite: joined, or of the rank that had such values first."""
    out = np.array(sorted(skipped), dtype=np.int64)

    def look(rank: int | None) -> tuple[Frame, np.ndarray, int | None]:
        frame = run.frame("gradient", "non_finite", rank=rank)
        return frame, frame.measured & (frame.values > 0) & ~np.isin(frame.steps, out)[:, None], rank

    joint = look(None)
    # What ranks do not agree on is not in the joined gradients: there they are asked one by one.
    ranks = run.attempts[-1].ranks[:MAX_RANKS] if run.attempts and joint[0].incomplete().any() else ()
    ill = [look_at for look_at in (joint, *map(look, ranks)) if look_at[1].any()]
    return min(ill, key=lambda v: int(v[0].steps[np.flatnonzero(v[1].any(axis=1))[0]]), default=joint)


def _in_gradients(
    run: Run, frame: Frame, ill_SP: np.ndarray, rows: np.ndarray, loss: Scalar, local: int | None
) -> Finding:
    row = int(rows[0])
    step = int(frame.steps[row])
    ill = np.flatnonzero(ill_SP[row])
    measured = np.flatnonzero(frame.measured[row])
    nearest = int(ill[-1])  # backward begins at the loss, so the last in model order is reached first
    name = frame.names[nearest]
    nan, inf, size = (
        int(run.frame("gradient", column, rank=local).values[row, nearest])
        for column in ("nan", "inf", "numel")
    )
    before = f"{int(frame.steps[row - 1])}" if row else "none"
    after = len(frame.steps) - row - 1
    later = len(rows) - 1
    evidence = [
        Evidence(f"series/gradient/nan/{name}", step, nan, "1"),
        Evidence(f"series/gradient/inf/{name}", step, inf, "1"),
    ]
    evidence += [
        Evidence(f"series/gradient/non_finite/{frame.names[i]}", step, int(frame.values[row, i]), "1")
        for i in ill[:-1][::-1][: phrases.EVIDENCE_ROWS - 1]
    ]
    evidence += _before(run, frame, row)
    rank, who, proof = _origin_rank(run, step)
    branch, proof_of_branch = _branch_words(run, loss, step)
    evidence += proof_of_branch
    samples = samples_at(run, step, step)
    evidence += [*proof, *samples.evidence]
    return Finding(
        severity=Severity.ERROR,
        title=f"Gradients are NaN or Inf from step {step} on, first in `{name}`",
        detail=(
            f"At step {step}, NaN or Inf are in "
            f"{phrases.share(len(ill), len(measured), 'measured parameters')}; the last finite recorded step "
            f"is {before}. Nearest to the loss is `{name}` with {nan} NaN and {inf} Inf among {size} values. "
            f"{_loss_words(loss, step, evidence)}{branch}"
            f"{_later_words(later, after)}{' ' if who else ''}{who} {samples.sentences(step)}"
        ).rstrip(),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=step, rank=rank),
        evidence=tuple(evidence),
        fix=_fix(step),
        refuted_if=(
            "the same batch and weights give finite gradients when run again; or the modules run in another "
            f"order than they are defined, so that `{name}` need not be the first."
        ),
    )


def _later_words(later: int, after: int) -> str:
    if not after:
        return " It is the last recorded step."
    return f" {later} of the {after} later recorded steps are not finite either."


def _origin_rank(run: Run, step: int) -> tuple[int | None, str, tuple[Evidence, ...]]:
    """Return the rank from which values that are not finite came at a step, in words, and the evidence.

    Nothing where one process trained, or where all ranks had them and no loss says who was first.
    """
    ranks = run.attempts[-1].ranks[:MAX_RANKS] if run.attempts else ()
    if len(ranks) < 2:
        return None, "", ()
    bad = {rank: count for rank in ranks if (count := _non_finite_count(run, rank, step))}
    if bad and len(bad) < len(ranks):
        text = ", ".join(f"{rank} ({count})" for rank, count in bad.items())
        paths = tuple(
            Evidence(f"series/gradient/non_finite, rank {rank}", step, count) for rank, count in bad.items()
        )
        who = f"Only {'rank' if len(bad) == 1 else 'ranks'} {text} of {len(ranks)} held such values."
        return (next(iter(bad)) if len(bad) == 1 else None), who, paths
    loss = run.spread("loss")
    row = np.flatnonzero(loss.steps == step)
    if not len(row):
        return None, "", ()
    ill = [
        (rank, float(loss.values[row[0], r]))
        for r, rank in enumerate(loss.ranks)
        if loss.logged[row[0], r] and not np.isfinite(loss.values[row[0], r])
    ]
    if not ill or len(ill) == int(loss.logged[row[0]].sum()):
        return None, "", ()
    names = ", ".join(str(rank) for rank, _ in ill)
    who = (
        f"Only the loss of {'rank' if len(ill) == 1 else 'ranks'} {names} of {len(loss.ranks)} was not "
        "finite: its batch brought it in, and the reduction of the gradients took it to all ranks."
    )
    evidence = tuple(
        Evidence(f"scalars/loss, rank {rank}", step, phrases.plain(value), "loss") for rank, value in ill
    )
    return (ill[0][0] if len(ill) == 1 else None), who, evidence


def _non_finite_count(run: Run, rank: int, step: int) -> int:
    frame = run.frame("gradient", "non_finite", rank=rank)
    row = np.flatnonzero(frame.steps == step)
    return int(frame.values[row[0]][frame.measured[row[0]]].sum()) if len(row) else 0


def _before(run: Run, frame: Frame, row: int) -> list[Evidence]:
    """Return the total norms of the recorded steps just before."""
    steps = frame.steps[max(0, row - HISTORY) : row]
    norms = total_norms(run, steps)
    return [
        phrases.total_norm(run, int(s), float(v)) for s, v in zip(steps, norms, strict=True) if np.isfinite(v)
    ]


def _loss_words(loss: Scalar, step: int, evidence: list[Evidence]) -> str:
    place = int(np.searchsorted(loss.steps, step))
    if place >= len(loss.steps) or loss.steps[place] != step:
        return "The loss of that step was not recorded."
    value = float(loss.values[place])
    evidence.append(phrases.scalar("loss", step, value, "loss"))
    if np.isfinite(value):
        return f"The loss of that step is finite ({phrases.number(value)}), so backward produced it."
    # The step before may have left it in a weight, as Adam does in fp16, where its eps is 0.
    words = phrases.number(value)
    return f"The loss of that step is {words}: forward produced it, or met it in a weight or in the batch."


def _branch_words(run: Run, loss: Scalar, step: int) -> tuple[str, list[Evidence]]:
    """Return a sentence on a branch that the graph leaves out, where the loss is finite, and the evidence."""
    place = int(np.searchsorted(loss.steps, step))
    is_finite = place < len(loss.steps) and loss.steps[place] == step and np.isfinite(loss.values[place])
    branches = [event for event in run.events("graph") if event.payload.get("rule") == "non_finite"]
    if not is_finite or not branches:
        return "", []
    by, function = (str(branches[0].payload.get(key, "")) for key in ("by", "function"))
    text = (
        f" Its graph has a `{by}` one of whose branches `{function}` makes: where that branch is not taken "
        "and its derivative is infinite, its gradient is 0 times infinity, which is NaN."
    )
    return text, [Evidence("events/graph", branches[0].step or 0, f"{by} over {function}")]


def _fix(step: int) -> str:
    return (
        f"Run `backlight nan SCRIPT` up to step {step}: it names the operation and the line that made the "
        "first NaN or Inf, such as a division by zero, a log or root of 0, an overflow in half precision or "
        "a bad batch."
    )
