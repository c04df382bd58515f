"""Which rank is the cause once ranks have ended, from the records that they left. No torch.

A backend may end the processes before anything stands still: the first rank that leaves takes the others
with it, within milliseconds. Their boards stay, and say who left by an error of its own, who had come to its
end, and who was waiting for whom.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from backlight.monitors.stalls.model.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation, in_phase
from backlight.monitors.stalls.model.shared_state import State
from backlight.records import DiagnosisKind, Phase

LONGEST = 200
"""Characters of a message that a claim repeats."""

LATE = 0.5
"""Seconds by which the end of a process may be noticed late."""


def failed(observations: Sequence[Observation]) -> list[Observation]:
    """Return the ranks whose training was left by an exception, the first one first."""
    found = [v for v in observations if v.exit_reason is not None and not v.exit_reason.asked]
    return sorted(found, key=lambda v: (v.exit_reason.at if v.exit_reason is not None else 0.0, v.rank))


def diagnose_failures(
    observations: Sequence[Observation], world: int, find_mismatch: Callable[[], Diagnosis | None]
) -> Diagnosis | None:
    """Return the verdict on a training of several ranks of which some were left by an exception.

    None where nothing can be said of the ranks: none has failed, somebody interrupted them, a rank was killed
    before, or every one has failed by an error of its own, which the tracebacks say better.

    Parameters
    ----------
    views:
        What was observed of each rank that can be seen.
    world:
        Number of ranks of the training, seen or not.
    unlike:
        Gives the verdict on calls that do not fit together, None where the records agree.
    """
    left = failed(observations)
    if not left or any(v.exit_reason is not None and v.exit_reason.asked for v in observations):
        return None
    first = left[0].exit_reason
    assert first is not None
    own = [v for v in left if v.exit_reason is not None and not v.exit_reason.inside]
    killed = [v.ended_at for v in observations if v.ended and not v.terminated]
    if killed and (not own or min(killed) - LATE < first.at):
        return None  # what fails in a collective fails because of it
    if own:
        return None if len(own) >= world else _own(own, left)
    what = _what(left)
    terminated = find_mismatch()
    if terminated is not None:
        return dataclasses.replace(terminated, claim=f"{terminated.claim}; {what}")
    return _nobody_there(observations, left, what)


def _own(own: Sequence[Observation], left: Sequence[Observation]) -> Diagnosis:
    """Judge ranks that failed by themselves: the others fail or wait because of them."""
    one = own[0]
    exit_reason, board = one.exit_reason, one.board
    assert exit_reason is not None
    at = f" at {exit_reason.line.rpartition('/')[2]} in {exit_reason.function}" if exit_reason.line else ""
    how = "has left its training out of memory" if exit_reason.memory else "has left its training"
    step = f", step {board.step}" if board is not None else ""
    names = ", ".join(str(v.rank) for v in own)
    error = exit_reason.error if len(exit_reason.error) <= LONGEST else f"{exit_reason.error[:LONGEST]}…"
    claim = f"DEAD: rank {names} {how}: {error}{at}{step}"
    after = [str(v.rank) for v in left if v not in own]
    if after:
        claim += f"; after it rank {', '.join(after)}"
    return Diagnosis(
        DiagnosisKind.DEAD,
        board.phase if board is not None else Phase.OTHER,
        claim,
        refuted_if="another rank has failed before",
        next_check="read the traceback of that rank",
        confidence=HIGH,
        rank=one.rank if len(own) == 1 else None,
        line=exit_reason.line,
    )


def _nobody_there(observations: Sequence[Observation], left: Sequence[Observation], what: str) -> Diagnosis:
    """Judge ranks that failed in a call which the rest, having come to its end, does not make."""
    over = [v for v in observations if v.board is not None and v.board.state is State.FINISHED]
    most = min((_backwards(v) for v in left), default=0)
    short = [v for v in over if _backwards(v) < most]
    if len(short) == 1:
        board = short[0].board
        assert board is not None
        return Diagnosis(
            DiagnosisKind.DEAD,
            board.phase,
            f"DEAD: rank {short[0].rank} has ended its training after step {board.step}, with "
            f"{board.backwards} backward passes where the others are at {most}; {what}",
            refuted_if="that rank still takes part",
            next_check="compare the number of batches of the ranks",
            confidence=HIGH,
            rank=short[0].rank,
        )
    if over and not short and len(left) == 1 and len(over) > 1:
        names = ", ".join(str(v.rank) for v in over)
        return Diagnosis(
            DiagnosisKind.MISMATCH,
            Phase.OTHER,
            f"MISMATCH: rank {left[0].rank} makes a call that rank {names}, which have ended, do not make; "
            f"{what}",
            refuted_if="the ranks that have ended have left something out",
            next_check="look for a call that only this rank makes",
            confidence=MEDIUM,
            rank=left[0].rank,
            waits=True,
        )
    exit_reason = left[0].exit_reason
    alive = [
        v for v in observations if v.board is not None and v.board.state is State.RUNNING and not v.ended
    ]
    for observation in alive[:4]:
        if observation.board is not None:
            what += f"; rank {observation.rank} is {in_phase(observation.board.phase)} "
            what += f"of step {observation.board.step}"
    return Diagnosis(
        DiagnosisKind.UNKNOWN,
        Phase.OTHER,
        f"UNKNOWN: {what}; which rank is the cause is undetermined",
        refuted_if="a rank is seen to have left before",
        next_check="read the tracebacks of the ranks in the order of their times",
        confidence=LOW,
        line=exit_reason.line if exit_reason is not None else None,
        waits=True,
    )


def _what(left: Sequence[Observation]) -> str:
    """Say in which calls ranks failed, and with which message."""
    said: dict[tuple[str, str], list[int]] = {}
    for observation in left:
        assert observation.exit_reason is not None
        calls = observation.board.collectives if observation.board is not None else ()
        last = calls[-1].text if calls and calls[-1].failed else observation.exit_reason.inside
        said.setdefault((last, _brief(observation.exit_reason.error)), []).append(observation.rank)
    parts = [
        f"rank {', '.join(map(str, sorted(ranks)))} failed in {call} ({error})"
        for (call, error), ranks in said.items()
    ]
    return "; ".join(parts[:3])


def _brief(error: str) -> str:
    """Return the first sentence of a message, without places in the backend's sources and addresses."""
    text = re.sub(r"\s*\[[^\]]*\]:?\d*", "", error)
    return re.split(r"\. |: This ", text, maxsplit=1)[0][:160]


def _backwards(observation: Observation) -> int:
    return observation.board.backwards if observation.board is not None else 0
