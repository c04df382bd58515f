"""How long a phase may last before somebody looks: given by the user, or following the run. No torch."""

from __future__ import annotations

from backlight.monitors.stalls.model.shared_state import StateSnapshot
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.records import Phase

EXEMPT_PHASES = frozenset({Phase.EVALUATION, Phase.CHECKPOINT})
"""Phases whose length says nothing: they are as long as the data or the disk make them."""

_COMPUTING = frozenset({Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER})


def timeout_s(state: StateSnapshot, limits: Thresholds) -> float | None:
    """Return the seconds without a beat after which a phase is looked at; None where it is exempt.

    Backward, clipping, the optimizer and collectives are never exempt, the first of them no more than
    the later ones. Data, forward and what lies between steps are, until the first backward: that is
    where a script prepares and compiles.
    """
    if state.phase in EXEMPT_PHASES and not state.inside:
        return None
    begun = state.backwards > 0 or state.forwards > 0 or state.phase in _COMPUTING
    if state.stall is not None:
        preparing = not begun and state.phase is Phase.OTHER and not state.inside
        return None if preparing else state.stall
    usual = limits.times_typical * state.typical.get(state.phase, 0.0)
    if state.phase in _COMPUTING:
        return max(limits.floor_collective if state.inside else limits.floor, usual)
    if state.inside:
        return max(limits.floor_collective, usual)
    if state.backwards == 0:
        return None
    floor = {Phase.DATA: limits.floor_data, Phase.OTHER: limits.floor_other}.get(
        state.phase, limits.floor_forward
    )
    return max(floor, usual)


def is_suspicious(state: StateSnapshot, limits: Thresholds) -> bool:
    """Tell whether looking closer is worth its cost: the patience is nearly over."""
    allowed = timeout_s(state, limits)
    if allowed is None:
        return False
    passed = state.phase_s if state.phase in _COMPUTING else state.silence_s
    return passed > max(allowed - 1.6, 0.3 * allowed)
