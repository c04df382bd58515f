"""The decision over all ranks: which is the cause (docs/formulas.md, section 5). No torch.

A pure function of the observations of ranks and the cause of each. The order: failed or dead, outside of
every collective, in another call, the outlier. "Least progress" is never a reason.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.cause import is_steady
from backlight.watchdog.collectives import (
    Absence,
    Awaited,
    CollectiveRecord,
    Cycle,
    Dump,
    Match,
    Mismatch,
    Unfinished,
    find_mismatch,
    match_calls,
    match_records,
)
from backlight.watchdog.diagnosis import HIGH, LOW, MEDIUM, Behind, Cause, Decision, Failure, What
from backlight.watchdog.observation import ExitReason, Observation, changes_stack, main_stacks
from backlight.watchdog.shared_state import RankStatus
from backlight.watchdog.stacks import Frame, strip_backlight, user_frame
from backlight.watchdog.waits import FOR_RANKS

Causes = Mapping[int, Cause | None]
"""The cause of each rank alone; None for one of which there is nothing to report."""

EXIT_DELAY_S = 0.5
"""Delay with which the end of a process may be noticed."""

_MOST_SEVERE_FIRST = (
    DiagnosisKind.DEAD,
    DiagnosisKind.STOPPED,
    DiagnosisKind.BLOCKED,
    DiagnosisKind.SPIN,
    DiagnosisKind.LONG_OP,
    DiagnosisKind.PHASE,
    DiagnosisKind.UNKNOWN,
    DiagnosisKind.SLOW,
)


def decide(observations: Sequence[Observation], causes: Causes, world_size: int) -> Decision | None:
    """Return one decision for all watched ranks, with the rank that is the cause where that is determined.

    ``observations`` are of the ranks that are observable from here, of ``world_size``. None where there is
    nothing to report, or not yet.
    """
    if world_size <= 1 or len(observations) == 1:
        cause = next((c for c in causes.values() if c is not None), None)
        if cause is None or world_size <= 1:
            return None if cause is None else Decision(cause)
        return open_to_unobserved(Decision(cause, named=cause.rank), observations, world_size)
    if any(o.exit_reason is not None and o.exit_reason.interrupted for o in observations):
        return None  # the user, or a launcher, ends the ranks, one after the other
    failed = _decide_failures(observations, world_size)
    if failed is not None:
        return open_to_unobserved(failed, observations, world_size)
    waiting = [o for o in observations if (cause := causes.get(o.rank)) is not None and cause.waits]
    gone = [o for o in observations if o.end is not None or o.stopped]
    if gone:
        return _gone(gone, waiting, causes, observations)
    if not waiting:
        stalled = [cause for cause in causes.values() if cause is not None]
        worst = max(stalled, key=_severity, default=None)
        return None if worst is None else Decision(worst, named=worst.rank)
    outside = [o for o in observations if o not in waiting]
    if outside:
        return _outside(outside, waiting, causes)
    decision = (
        decide_calls(observations)
        or _match_issued(observations)
        or _match_absent(observations)
        or _outlier(observations, causes)
    )
    if decision is None:
        first = next(cause for cause in causes.values() if cause is not None and cause.waits)
        cause = replace(first, kind=DiagnosisKind.UNKNOWN, what=What.ALL_WAIT, rank=None, confidence=LOW)
        decision = Decision(cause, waiting=_waits_in(waiting))
    return open_to_unobserved(decision, observations, world_size)


def decide_calls(observations: Sequence[Observation]) -> Decision | None:
    """Return the first collective call in which the ranks differ, also where nothing hangs."""
    mismatch = find_mismatch(_calls(observations))
    return None if mismatch is None else Decision(_matched(mismatch))


def open_to_unobserved(decision: Decision, observations: Sequence[Observation], world_size: int) -> Decision:
    """Leave the cause open where it may be a rank of another machine, which is not observed."""
    if len(observations) >= world_size or not decision.cause.waits:
        return decision
    cause = replace(decision.cause, rank=None, confidence=LOW)
    return replace(decision, cause=cause, unobserved=(world_size - len(observations), world_size))


def _severity(cause: Cause | None) -> int:
    if cause is None or cause.kind not in _MOST_SEVERE_FIRST:
        return 0
    return len(_MOST_SEVERE_FIRST) - _MOST_SEVERE_FIRST.index(cause.kind)


def _waits_in(waiting: Sequence[Observation]) -> dict[int, Awaited | None]:
    return {o.rank: o.waits_in if o.state is not None else None for o in waiting}


# Ranks that have ended, or are in no collective


def _gone(
    gone: Sequence[Observation],
    waiting: Sequence[Observation],
    causes: Causes,
    observations: Sequence[Observation],
) -> Decision | None:
    def order(obs: Observation) -> tuple[bool, bool, float, int]:
        # What a launcher ends is never the first to go.
        return obs.end is not None and obs.end.is_termination, obs.stopped, obs.ended_at, obs.rank

    first, *later = sorted(gone, key=order)
    cause, end = causes.get(first.rank), first.end
    if cause is None:
        return None
    mismatch = decide_calls(observations)
    gave_up = end is None or not end.signal or end.is_termination or end.signal == signal.SIGABRT
    if mismatch is not None and gave_up:
        # The backend gave up on calls that do not fit together: they are the cause, not the first rank to
        # notice.
        return mismatch if end is None else replace(mismatch, noticed=(first.rank, end))
    return Decision(cause, waiting=_waits_in(waiting), later=tuple(o.rank for o in later))


def _outside(
    outside: Sequence[Observation], waiting: Sequence[Observation], causes: Causes
) -> Decision | None:
    """Return the decision on ranks that are in no collective and keep the others waiting.

    None where one of them has neither moved since the others wait, nor been silent for long enough.
    """
    obs = min(outside, key=lambda o: (-_severity(causes.get(o.rank)), o.rank))
    rank, waits = obs.rank, _waits_in(waiting)
    only = rank if len(outside) == 1 else None
    cause, state = causes.get(rank), obs.state
    if cause is not None and cause.kind is not DiagnosisKind.UNKNOWN:
        stalled = [o.rank for o in outside if causes.get(o.rank) is not None]
        blamed = stalled[0] if len(stalled) == 1 else only
        return Decision(replace(cause, rank=blamed), named=rank, waiting=waits)
    if state is not None and state.is_closed:
        failed = state.status is RankStatus.FAILED
        what = What.TRAINING_FAILED if failed else What.TRAINING_ENDED
        ended = Cause(DiagnosisKind.DEAD, what, state.phase, HIGH, only, step=state.step, ranks=(rank,))
        return Decision(ended, waiting=waits, behind=_behind(obs, waiting))
    if cause is not None:
        return Decision(replace(cause, rank=rank), named=rank, waiting=waits)
    since = max((o.state.heartbeat for o in waiting if o.state is not None), default=0)
    if not all(is_steady(o, since) for o in outside if causes.get(o.rank) is None):
        return None
    step, ranks = None if state is None else state.step, tuple(o.rank for o in outside)
    straggler = Cause(DiagnosisKind.SLOW, What.STRAGGLER, obs.phase, rank=only, step=step, ranks=ranks)
    return Decision(straggler, waiting=waits)


def _behind(cause: Observation, others: Sequence[Observation]) -> Behind | None:
    """Return by how many backward passes a rank is behind those that are in one."""
    reached = [o.backwards + (o.phase is Phase.BACKWARD) for o in others if o.state is not None]
    if cause.state is None or not reached or cause.backwards >= max(reached):
        return None
    return Behind(cause.rank, cause.backwards, max(reached))


# Failures: a backend may end the processes before anything hangs, and the first rank that leaves takes the
# others with it, within milliseconds. Their shared states remain.

_Failures = list[tuple[Observation, ExitReason]]


def _decide_failures(observations: Sequence[Observation], world_size: int) -> Decision | None:
    """Return the decision on a run of several ranks of which some were left by an exception.

    None where nothing can be attributed: no rank has failed, a rank was killed before, or each has failed by
    an error of its own, for which its traceback reports more.
    """
    failures = [(o, o.exit_reason) for o in observations if o.exit_reason is not None]
    if not failures:
        return None
    failures.sort(key=lambda pair: (pair[1].at, pair[0].rank))
    by_itself = [(o, reason) for o, reason in failures if not reason.inside]
    killed = [o.ended_at for o in observations if o.end is not None and not o.end.is_termination]
    if killed and (not by_itself or min(killed) - EXIT_DELAY_S < failures[0][1].at):
        return None  # what fails in a collective fails because of it
    if by_itself:
        return None if len(by_itself) >= world_size else _left_by_error(by_itself, failures)
    mismatch = decide_calls(observations)
    decision = mismatch or _failed_in_collective(observations, failures)
    return replace(decision, failures=_group_failures(failures))


def _left_by_error(by_itself: _Failures, failures: _Failures) -> Decision:
    obs, reason = by_itself[0]
    cause = Cause(
        DiagnosisKind.DEAD, What.LEFT_BY_ERROR, obs.phase, HIGH, obs.rank if len(by_itself) == 1 else None,
        step=None if obs.state is None else obs.state.step, line=reason.line, error=reason,
        ranks=tuple(o.rank for o, _ in by_itself),
    )  # fmt: skip
    return Decision(cause, later=tuple(o.rank for o, r in failures if r.inside))


def _failed_in_collective(observations: Sequence[Observation], failures: _Failures) -> Decision:
    """Return the decision on ranks that failed in a call which the finished ranks do not make."""
    finished = [o for o in observations if o.state is not None and o.state.status is RankStatus.FINISHED]
    fewest = min(o.backwards for o, _ in failures)
    short = [o for o in finished if o.backwards < fewest]
    first, reason = failures[0]
    if len(short) == 1 and short[0].state is not None:
        obs, state = short[0], short[0].state
        rank = obs.rank
        cause = Cause(
            DiagnosisKind.DEAD, What.TRAINING_ENDED, obs.phase, HIGH, rank, step=state.step, ranks=(rank,)
        )
        return Decision(cause, behind=Behind(rank, obs.backwards, fewest))
    if not short and len(failures) == 1 and len(finished) > 1:
        ended = tuple(o.rank for o in finished)
        return Decision(
            Cause(DiagnosisKind.MISMATCH, What.EXTRA_CALL, rank=first.rank, others=ended, waits=True)
        )
    running = tuple(
        (o.rank, o.phase, o.state.step)
        for o in observations
        if o.state is not None and o.state.status is RankStatus.RUNNING and o.end is None
    )
    return Decision(
        Cause(
            DiagnosisKind.UNKNOWN, What.FAILED_TOGETHER, confidence=LOW, line=reason.line, waits=True,
            running=running[:4],
        )
    )  # fmt: skip


def _group_failures(failures: _Failures) -> tuple[Failure, ...]:
    grouped: dict[tuple[str, str], Failure] = {}
    for obs, reason in failures:
        call = obs.last_call or reason.inside
        key = call.text if isinstance(call, CollectiveRecord) else call.value, reason.error
        ranks = grouped[key].ranks if key in grouped else ()
        grouped[key] = Failure(tuple(sorted((*ranks, obs.rank))), call, reason.error)
    return tuple(grouped.values())


# Calls of the ranks, matched


def _calls(observations: Sequence[Observation]) -> dict[int, Dump]:
    return {o.rank: calls for o in observations if (calls := o.calls) is not None}


def _matched(shown: Match) -> Cause:
    """Return the cause that the collectives of the ranks show."""
    kind, confidence, rank, line = DiagnosisKind.MISMATCH, MEDIUM, None, ""
    match shown:
        case Mismatch():
            confidence, rank = HIGH, shown.rank
            line = shown.calls[shown.rank].line if shown.rank is not None else ""
        case Cycle():
            confidence, rank = LOW if shown.cause is None else MEDIUM, shown.cause
        case Absence():
            rank, line = shown.cause, shown.wait.call.line
            kind = DiagnosisKind.MISMATCH if shown.elsewhere else DiagnosisKind.BLOCKED
        case Unfinished():
            late, kind = shown.late, DiagnosisKind.BLOCKED
            confidence = MEDIUM if late else LOW
            rank = late[0] if len(late) == 1 < len(shown.wait.inside) else None
    return Cause(
        kind, What.MATCHED, confidence=confidence, rank=rank, line=line or None, waits=True, match=shown
    )


def _match_issued(observations: Sequence[Observation]) -> Decision | None:
    """Match what the flight recorders of the ranks hold; None where some rank has none."""
    dumps = {o.rank: dump for o in observations if (dump := o.dump) is not None}
    shown = match_records(dumps) if len(dumps) == len(observations) else None
    return None if shown is None else _with_behind(_matched(shown), observations)


def _match_absent(observations: Sequence[Observation]) -> Decision | None:
    """Find a call in which ranks of its group wait while others have not entered it."""
    shown = match_calls(_calls(observations), {o.rank: o.waits_in for o in observations})
    if shown is None:
        return None
    cause = _matched(shown)
    confidence = MEDIUM if cause.rank is not None else LOW
    return _with_behind(replace(cause, kind=DiagnosisKind.MISMATCH, confidence=confidence), observations)


def _with_behind(cause: Cause, observations: Sequence[Observation]) -> Decision:
    """Add that the rank at fault has made fewer backward passes than those that reduce gradients."""
    reducing = [o for o in observations if o.rank != cause.rank and o.phase is Phase.BACKWARD]
    blamed = next((o for o in observations if o.rank == cause.rank), None)
    return Decision(cause, behind=None if blamed is None else _behind(blamed, reducing))


def _outlier(observations: Sequence[Observation], causes: Causes) -> Decision | None:
    """Find the one rank that waits in another call than a majority that agrees."""

    def where(obs: Observation) -> tuple[str, str]:
        call = obs.current_call
        return (call.call_text, "") if call is not None else ("", obs.phase)

    ((common, count),) = Counter(map(where, observations)).most_common(1)
    outliers = [o for o in observations if where(o) != common]
    if len(outliers) != 1 or count < 2:
        return None
    obs, usual = outliers[0], next(o for o in observations if where(o) == common)
    line = cause.line if (cause := causes.get(obs.rank)) is not None else None
    return Decision(
        Cause(
            DiagnosisKind.MISMATCH, What.OTHER_CALL, obs.phase, MEDIUM, obs.rank, line=line, waits=True,
            call=obs.waits_in, usual=usual.waits_in, count=count,
        )
    )  # fmt: skip


# Ranks of which only dumps remain


def decide_dumps(observations: Sequence[Observation]) -> tuple[Decision, tuple[int, ...]]:
    """Return the decision on ranks by their flight recorders alone, and the ranks that left no dump."""
    dumps = {o.rank: o.dump for o in observations if o.dump is not None}
    members = {rank for dump in dumps.values() for record in dump.records for rank in record.ranks}
    missing = tuple(sorted(members - set(dumps)))
    shown = match_records(dumps)
    cause = _matched(shown) if shown is not None else _all_matched(dumps)
    if not missing or cause.confidence == HIGH:
        return Decision(cause), missing
    return Decision(replace(cause, rank=None), no_dump=missing), missing


def _all_matched(dumps: Mapping[int, Dump]) -> Cause:
    count = sum(len(dump.records) for dump in dumps.values())
    still_open = [(rank, r) for rank, dump in dumps.items() for r in dump.records if not r.completed]
    if not still_open:
        return Cause(DiagnosisKind.PASS, What.ALL_COMPLETED, count=count, ranks=tuple(dumps))
    # Of a group that was made again, for instance.
    ranks = tuple(rank for rank, _ in still_open)
    _, call = still_open[0]
    return Cause(
        DiagnosisKind.UNKNOWN, What.OPEN_RECORDS, confidence=LOW, count=count, ranks=ranks, call=call
    )


# Ranks of a job that are observed from outside, by their stacks


def shown_stack(obs: Observation) -> tuple[Frame, ...]:
    """Return the stack of the main thread of a rank at its first sample, without backlight's own frames."""
    threads = main_stacks(obs)
    return strip_backlight(threads[0].frames) if threads else ()


def group_by_stack(observations: Sequence[Observation]) -> list[list[int]]:
    """Return the ranks of a job that have the same stack, the largest group first."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for obs in observations:
        groups.setdefault(shown_stack(obs), []).append(obs.rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def decide_job(
    observations: Sequence[Observation],
    causes: Mapping[int, Cause],
    elsewhere: Sequence[int],
    ranks_in_store: Callable[[], frozenset[int]],
) -> Decision:
    """Decide on a rank that has ended, a named wait, ranks that do not come, or the rank that differs.

    ``elsewhere`` are ranks without a process on this machine, ``ranks_in_store`` those that have come.
    """
    by_rank = {o.rank: o for o in observations}
    named = {rank: o.cause for rank, o in by_rank.items() if o.cause is not None}
    at_fault = [r for r, o in by_rank.items() if o.end is not None or o.stopped]
    at_fault += [r for r, wait in named.items() if wait.name not in FOR_RANKS and not wait.progresses]
    if at_fault:
        return _of_rank(causes[at_fault[0]])
    coming = [r for r, wait in named.items() if wait.name in FOR_RANKS]
    if coming and not all(named[rank].progresses for rank in coming):
        store = ranks_in_store()
        late = tuple(rank for rank in by_rank if rank not in coming)
        missing = tuple(rank for rank in elsewhere if rank not in store)
        absent = [*late, *missing]
        cause = Cause(
            DiagnosisKind.BLOCKED, What.NOT_COME, confidence=HIGH if absent else LOW,
            rank=absent[0] if len(absent) == 1 else None, line=causes[coming[0]].line,
            ranks=tuple(coming), others=late, missing=missing, is_store_read=bool(store),
            named=named[coming[0]],
        )  # fmt: skip
        return Decision(cause)
    if named:  # what they wait for computes
        return _of_rank(causes[next(iter(named))])
    if all(o.state is not None for o in observations):
        stalled = {r: None if c.kind is DiagnosisKind.PASS else c for r, c in causes.items()}
        decision = decide(observations, stalled, len(by_rank) + len(elsewhere))
        if decision is not None:
            return decision
    moving = tuple(r for r, o in by_rank.items() if _moves(o, causes[r]))
    waiting = [rank for rank in by_rank if causes[rank].waits]
    if len(moving) == len(by_rank) or set(moving) & set(waiting):
        return Decision(Cause(DiagnosisKind.PASS, What.JOB_MOVES, ranks=moving))
    others = [rank for rank in by_rank if rank not in waiting]
    groups = group_by_stack(observations)
    if waiting and len(others) == 1:
        return _of_rank(causes[others[0]], waiting)
    if len(groups) == 2 and len(groups[1]) == 1 < len(groups[0]):
        return _of_rank(causes[groups[1][0]], [r for r in waiting if r != groups[1][0]])
    frames = tuple((tuple(g), _line_of(by_rank[g[0]])) for g in groups[:4])
    first = causes[groups[0][0]]
    kind = DiagnosisKind.UNKNOWN if waiting else first.kind
    what = What.NO_RANK_DIFFERS
    return Decision(replace(first, kind=kind, what=what, lines=frames, confidence=LOW, rank=None))


def _moves(obs: Observation, cause: Cause) -> bool:
    return cause.kind is DiagnosisKind.PASS if obs.state is not None else changes_stack(obs)


def _line_of(obs: Observation) -> Frame | None:
    threads = main_stacks(obs)
    return user_frame(threads[0]) if threads else None


def _of_rank(cause: Cause, waiting: Sequence[int] = ()) -> Decision:
    cause = replace(cause, confidence=HIGH if cause.confidence == HIGH else MEDIUM)
    return Decision(cause, named=cause.rank, shows_pid=True, waiting=dict.fromkeys(waiting))
