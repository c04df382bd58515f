"""The finding of ``replicas_differ`` on data that changed on its way between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from backlight.findings import phrases
from backlight.monitors.correctness.model.transfers import TRANSFER, Differing, differing
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.store.read.run import Run
from backlight.text import count, listed


def changed_in_transfer(run: Run, least: int) -> Finding | None:
    """Return the finding where transfers differ at ``least`` observed steps or more."""
    found, compared = differing(run)
    steps = sorted({one.step for one in found})
    return _finding(found, steps, compared) if len(steps) >= least else None


def _finding(found: Sequence[Differing], steps: Sequence[int], compared: int) -> Finding:
    first = found[0]
    ranks = sorted({rank for one in found for rank in one.ranks})
    calls = sorted({one.call for one in found})
    named = listed([f"`{one}`" for one in calls])
    who = f"{'Rank' if len(ranks) == 1 else 'Ranks'} {listed([str(one) for one in ranks])}"
    norms = listed([f"{phrases.number(norm)} on rank {rank}" for rank, norm in list(first.norms.items())[:4]])
    if len({phrases.number(norm) for norm in first.norms.values()}) == 1:
        norms += ", with other values"
    return Finding(
        severity=Severity.ERROR,
        title=(
            f"{who} received other values than were sent, from step {steps[0]} on"
            if all(one.is_pair for one in found)
            else f"{named} gave {who.lower()} other results from step {steps[0]} on"
        ),
        detail=(
            f"{count(len(found), 'transfer')} by {named} of {compared} that were compared differ, at "
            f"{count(len(steps), 'observed step')}. At step {first.step} the norm of the data is {norms}. "
            "Each rank read it as the call ended, a sender as it began."
        ),
        subject=Subject(step=first.step, rank=first.ranks[0]),
        evidence=tuple(
            Evidence(f"events/{TRANSFER}, rank {rank}", first.step, phrases.plain(norm), "norm")
            for rank, norm in list(first.norms.items())[: phrases.EVIDENCE_ROWS]
        ),
        fix=(
            "Test the link between these devices (`all_reduce_perf` and `sendrecv_perf` of nccl-tests check "
            "values), and look for Xid and ECC errors. If `NCCL_P2P_DISABLE=1` helps, it is the "
            "direct link."
        ),
        refuted_if="another thread or stream writes to the tensor while the transfer is under way.",
    )
