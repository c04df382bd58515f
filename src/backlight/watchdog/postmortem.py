"""Diagnosis of ranks that have ended, from the records that they left. No torch.

A backend may end the processes before anything hangs: the first rank that leaves takes the others with it,
within milliseconds. Their shared states remain, and hold which rank left by an error of its own, which has
finished, and which waited in which call.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.observation import (
    HIGH,
    LOW,
    MEDIUM,
    Diagnosis,
    ExitReason,
    Observation,
    in_phase,
)
from backlight.watchdog.shared_state import RankStatus

MAX_CLAIM_CHARS = 200
"""Characters of a message that a claim repeats."""

EXIT_DELAY_S = 0.5
"""Delay with which the end of a process may be noticed."""

_Failures = list[tuple[Observation, ExitReason]]


def diagnose_failures(
    observations: Sequence[Observation], world_size: int, find_mismatch: Callable[[], Diagnosis | None]
) -> Diagnosis | None:
    """Return the diagnosis of a run of several ranks of which some were left by an exception.

    None where nothing can be attributed: no rank has failed, a rank was killed before, or each has failed by
    an error of its own, for which its traceback says more.
    """
    failures = [(o, o.exit_reason) for o in observations if o.exit_reason is not None]
    if not failures:
        return None
    failures.sort(key=lambda pair: (pair[1].at, pair[0].rank))
    own = [(o, reason) for o, reason in failures if not reason.inside]
    killed = [o.ended_at for o in observations if o.ended and not o.terminated]
    if killed and (not own or min(killed) - EXIT_DELAY_S < failures[0][1].at):
        return None  # what fails in a collective fails because of it
    if own:
        return None if len(own) >= world_size else _own_failure(own, failures)
    words = _failure_words(failures)
    mismatch = find_mismatch()
    if mismatch is not None:
        return dataclasses.replace(mismatch, claim=f"{mismatch.claim}; {words}")
    return _failed_in_collective(observations, failures, words)


def _own_failure(own: _Failures, failures: _Failures) -> Diagnosis:
    """Diagnose ranks that failed by themselves: the others fail or wait because of them."""
    obs, reason = own[0]
    at = f" at {reason.line.rpartition('/')[2]} in {reason.function}" if reason.line else ""
    how = "has left its training out of memory" if reason.out_of_memory else "has left its training"
    step = f", step {obs.state.step}" if obs.state is not None else ""
    error = reason.error if len(reason.error) <= MAX_CLAIM_CHARS else f"{reason.error[:MAX_CLAIM_CHARS]}…"
    claim = f"DEAD: rank {', '.join(str(o.rank) for o, _ in own)} {how}: {error}{at}{step}"
    later = [str(o.rank) for o, r in failures if r.inside]
    if later:
        claim += f"; after it rank {', '.join(later)}"
    return Diagnosis(
        DiagnosisKind.DEAD,
        obs.phase,
        claim,
        refuted_if="another rank has failed before",
        next_check="read the traceback of that rank",
        confidence=HIGH,
        rank=obs.rank if len(own) == 1 else None,
        line=reason.line,
    )


def _failed_in_collective(observations: Sequence[Observation], failures: _Failures, words: str) -> Diagnosis:
    """Diagnose ranks that failed in a call which the finished ranks do not make."""
    finished = [o for o in observations if o.state is not None and o.state.status is RankStatus.FINISHED]
    fewest = min(o.backwards for o, _ in failures)
    short = [o for o in finished if o.backwards < fewest]
    first, reason = failures[0]
    if len(short) == 1 and short[0].state is not None:
        return Diagnosis(
            DiagnosisKind.DEAD,
            short[0].phase,
            f"DEAD: rank {short[0].rank} has ended its training after step {short[0].state.step}, with "
            f"{short[0].backwards} backward passes where the others are at {fewest}; {words}",
            refuted_if="that rank still takes part",
            next_check="compare the number of batches of the ranks",
            confidence=HIGH,
            rank=short[0].rank,
        )
    if not short and len(failures) == 1 and len(finished) > 1:
        names = ", ".join(str(o.rank) for o in finished)
        return Diagnosis(
            DiagnosisKind.MISMATCH,
            Phase.OTHER,
            f"MISMATCH: rank {first.rank} makes a call that rank {names}, which have ended, do not make; "
            f"{words}",
            refuted_if="the ranks that have ended have left a call out",
            next_check="look for a call that only this rank makes",
            confidence=MEDIUM,
            rank=first.rank,
            waits=True,
        )
    running = [
        f"; rank {o.rank} is {in_phase(o.phase)} of step {o.state.step}"
        for o in observations
        if o.state is not None and o.state.status is RankStatus.RUNNING and not o.ended
    ]
    return Diagnosis(
        DiagnosisKind.UNKNOWN,
        Phase.OTHER,
        f"UNKNOWN: {words}{''.join(running[:4])}; which rank is the cause is undetermined",
        refuted_if="a rank is observed to have left before",
        next_check="read the tracebacks of the ranks in the order of their times",
        confidence=LOW,
        line=reason.line,
        waits=True,
    )


def _failure_words(failures: _Failures) -> str:
    """Return in which calls ranks failed, and with which message."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for obs, reason in failures:
        calls = obs.state.collectives if obs.state is not None else ()
        call = calls[-1].text if calls and calls[-1].failed else reason.inside
        # The first sentence, without source positions and addresses of the backend.
        text = re.sub(r"\s*\[[^\]]*\]:?\d*", "", reason.error)
        error = re.split(r"\. |: This ", text, maxsplit=1)[0][:160]
        ranks.setdefault((call, error), []).append(obs.rank)
    parts = [
        f"rank {', '.join(map(str, sorted(failed)))} failed in {call} ({error})"
        for (call, error), failed in ranks.items()
    ]
    return "; ".join(parts[:3])
