"""Limits of the stalls monitor and the timeouts of phases that follow from them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backlight.findings.limits import Limits, limit
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.watchdog.shared_state import StateSnapshot

EXEMPT_PHASES = frozenset({Phase.EVALUATION, Phase.CHECKPOINT})
"""Phases without a diagnosis: their duration depends on the amount of data, or on the disk.

Only a wait with a name inside a checkpoint has one.
"""

TIMES_LONGEST = 2.0
"""Multiple of the longest time between phases so far up to which another is ordinary."""

MAX_LONGEST_S = 3600.0
"""Most seconds that follow from it: a script may have prepared for hours."""

END_TIMEOUT_S = 0.7
"""Time that the watchdog may wait for anything once all ranks have ended."""

REGULAR_STEPS = 20
"""Backward passes from which on the steps of a run may be called regular."""

_COMPUTING = frozenset({Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER})


@dataclass(frozen=True)
class StallLimits(Limits, monitor="stalls"):
    """Limits of the rule ``stall`` and of every diagnosis behind it; times are in seconds."""

    times_typical: float = limit(
        10.0, "a phase that takes ten times its moving mean has changed its behaviour", low=1.0
    )
    floor: float = limit(30.0, "backward, clipping or optimizer: a shorter pause needs no diagnosis", low=0.1)
    floor_collective: float = limit(
        60.0, "inside a collective: the other ranks may compile or write a checkpoint", low=0.1
    )
    floor_forward: float = limit(
        60.0, "forward or loss: recompilation of a new shape takes this long", low=0.1
    )
    floor_data: float = limit(60.0, "waiting for data: a new epoch starts its workers", low=0.1)
    floor_other: float = limit(300.0, "between steps: the script may do anything there", low=0.1)
    floor_checkpoint: float = limit(
        600.0, "inside a checkpoint, in a wait with a name: a large one takes minutes to write", low=0.1
    )
    floor_start: float = limit(
        30.0, "without any work before the first backward, in a wait with a name", low=0.1
    )
    idle: float = limit(0.05, "share of one core below which a process waits rather than works", high=1.0)
    busy: float = limit(0.6, "share of one core above which a thread computes without a pause", high=1.0)
    looks: float = limit(3.0, "stack samples without which a finding names no line", low=2.0)
    window: float = limit(0.6, "seconds that the stack samples must span", low=0.1)


def timeout_of(state: StateSnapshot, limits: StallLimits) -> float | None:
    """Return the seconds without a heartbeat after which a phase is diagnosed, None for no timeout."""
    if state.phase in EXEMPT_PHASES and not state.inside:
        return limits.floor_checkpoint if state.phase is Phase.CHECKPOINT else None
    begun = state.backwards > 0 or state.forwards > 0 or state.phase in _COMPUTING
    if state.timeout_s is not None:
        preparing = not begun and state.phase is Phase.OTHER and not state.inside
        return None if preparing else state.timeout_s
    usual = limits.times_typical * state.typical.get(state.phase, 0.0)
    if state.inside:
        return max(limits.floor_collective, usual)
    if state.phase in _COMPUTING:
        return max(limits.floor, usual)
    if state.backwards == 0:
        return None  # a script prepares and compiles
    floor = {Phase.DATA: limits.floor_data, Phase.OTHER: limits.floor_other}.get(
        state.phase, limits.floor_forward
    )
    if state.phase is Phase.OTHER:
        # Rollouts of reinforcement learning last for minutes, with many short pauses between them that make
        # up the mean. The first one may come before the first backward.
        return max(floor, usual, min(TIMES_LONGEST * state.longest_other_s, MAX_LONGEST_S))
    return max(floor, usual)


def waiting_timeout_of(state: StateSnapshot, limits: StallLimits, at_start_s: float = 0.0) -> float | None:
    """Return the timeout of a thread that only waits: outside of backward as in it, once steps are regular.

    They are where no pause so far has lasted a tenth of it; a longer one, such as an evaluation of the
    script's own, is expected again. Of several ranks the others wait in a collective, which has its own.
    ``at_start_s`` was the longest pause when the run was first observed, in which a script prepares: none so
    long since, it does not count up to a third of the timeout.
    """
    timeout_s = timeout_of(state, limits)
    has_other = timeout_s is None or state.timeout_s is not None or state.inside or state.world_size > 1
    if has_other or state.phase not in {Phase.OTHER, Phase.DATA} or state.backwards < REGULAR_STEPS:
        return timeout_s
    is_of_start = state.longest_other_s <= at_start_s <= limits.floor / 3
    longest_s = 0.0 if is_of_start else state.longest_other_s
    usual = limits.times_typical * max(state.typical.get(state.phase, 0.0), longest_s)
    return limits.floor if usual <= limits.floor else timeout_s


def is_preparing(state: StateSnapshot) -> bool:
    """Return whether a rank has no timeout since it has not trained yet."""
    is_exempt = state.phase in EXEMPT_PHASES or state.phase in _COMPUTING or state.inside
    return not state.backwards and not is_exempt


def is_suspicious(state: StateSnapshot, limits: StallLimits, at_start_s: float = 0.0) -> bool:
    """Return whether the timeout is so near that stack samples are worth their cost."""
    timeout_s = waiting_timeout_of(state, limits, at_start_s)
    if timeout_s is None:
        return False
    passed = state.phase_s if state.phase in _COMPUTING else state.silence_s
    return passed > max(timeout_s - 1.6, 0.3 * timeout_s)
