"""Whether a run was recorded to its end, and if not, what is missing. No torch.

The one answer to this question: a run that lacks anything here is never reported as free of findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from backlight.records import EVERYTHING, FROM_HERE_ON, OTHERS, UNMEASURED, RunStatus
from backlight.store.format.manifest import AttemptEntry, Progress
from backlight.store.format.schema import DISK_LIMIT, DROPPED, NOT_STORED
from backlight.store.read.attempt_files import AttemptFiles
from backlight.text import count, visible

Payloads = Callable[[str], Sequence[tuple[int | None, Mapping[str, Any]]]]
"""Returns global step and payload of the events of a kind."""


def shortfall(attempts: Sequence[AttemptFiles], payloads: Payloads, *, is_damaged: bool) -> str:
    """Return what a run lacks, as ``recording stopped at step 256 of 2,500``; empty where it lacks nothing.

    Of an attempt that another one continues only what was lost while it ran counts, not how it ended.
    ``is_damaged`` is whether something is missing or unreadable that was stored.
    """
    otherwise = "a part of what was stored is missing" if is_damaged else ""
    return next(_reasons(attempts, payloads), otherwise)


def shortfall_of_first(entry: AttemptEntry, last_step: int) -> str:
    """Return what a run lacks by the progress of its first rank; ``last_step`` is the last in its files."""
    return _of_rank(entry, entry.first, entry.progress, last_step, is_last=True)


def _reasons(attempts: Sequence[AttemptFiles], payloads: Payloads) -> Iterator[str]:
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        # How the others end once one has failed is no news.
        is_cut = is_last and attempt.entry.progress.status_now() is not RunStatus.FAILED
        for rank, progress in sorted(attempt.progress.items()):
            last = max((file.last_step for file in attempt.files if file.rank == rank), default=-1)
            if reason := _of_rank(attempt.entry, rank, progress, last, is_last=is_cut):
                yield reason
        if is_last and (missing := _missing_ranks(attempt)):
            yield missing
    yield from _of_events(payloads, is_whole=all(len(a.ranks) == a.entry.world_size > 1 for a in attempts))


def _of_rank(entry: AttemptEntry, rank: int, progress: Progress, last_step: int, *, is_last: bool) -> str:
    """Return where and why the recording of a rank stopped short; empty where it did not."""
    taken = max(last_step, entry.step_offset + progress.step)
    on_rank = f" on rank {rank}" if entry.world_size > 1 else ""
    if progress.lost:
        stored = entry.step_offset + progress.stored
        if progress.stored < 0:
            return f"nothing was recorded of {count(taken + 1, 'step')}{on_rank}"
        total = f" of {taken + 1:,}" if taken > stored else ""
        return f"recording stopped at step {stored:,}{total}{on_rank}"
    status = progress.status_now() if is_last else RunStatus.FINISHED
    at = f"step {taken:,}" if taken >= entry.step_offset else "the first step"
    match status:
        case RunStatus.RUNNING:
            return f"still running, at {at}{on_rank}"
        case RunStatus.KILLED:
            return f"recording stopped at {at}{on_rank}"
        case RunStatus.UNKNOWN:
            return f"recorded up to {at}{on_rank}, and how it ended is not known"
        case RunStatus.FAILED if rank != entry.first:
            return f"rank {rank} ended with an error at {at}"
    return ""


def _missing_ranks(attempt: AttemptFiles) -> str:
    """Return which ranks of an attempt left nothing; empty where all did, or only one rank exists."""
    size, known = attempt.entry.world_size, {*attempt.ranks, *attempt.progress}
    missing = size - len(known)
    if missing <= 0 or size == 1:
        return ""
    if missing > 1:
        return f"{missing:,} of {size:,} ranks were not recorded"
    rank = next(rank for rank in range(size) if rank not in known)
    return f"rank {rank} of {size:,} was not recorded"


def _of_events(payloads: Payloads, *, is_whole: bool = False) -> Iterator[str]:
    """Yield what the events of a run report as lost; ``is_whole`` is whether all ranks of a run are here."""
    for step, payload in payloads(UNMEASURED):
        what = visible(payload.get("what", "something"))
        if what == OTHERS and not is_whole:
            yield "other ranks were not recorded"
        elif text := payload.get("lacks"):
            yield visible(text)
        elif payload.get("lost"):
            at = "" if step is None else f" at step {step:,}"
            of = "" if what == EVERYTHING else f" of {what.removesuffix(FROM_HERE_ON)}"
            yield f"recording{of} stopped{at}"
    if dropped := sum(int(payload.get("steps", 0)) for _, payload in payloads(DROPPED)):
        yield f"{count(dropped, 'recorded step')} could not be stored: the disk is too slow"
    if any(True for _ in payloads(NOT_STORED)):
        yield "a part of what was recorded could not be stored"
    for step, payload in payloads(DISK_LIMIT):
        if not payload.get("stride", 1):
            yield "recording stopped at the disk limit" + ("" if step is None else f", at step {step:,}")
