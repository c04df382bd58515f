"""How a reported stall went on: it moves again, its backward raised, or its process left. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.monitors.stalls.model.exit_reason import ExitReason
from backlight.monitors.stalls.model.shared_state import State, StateSnapshot

MOVES = "stall_over"
"""Event of a rank that moves again."""

ENDED = "stall_ended"
"""Event of a rank that never moved again: its payload says how it ended."""


@dataclass
class ReportedStall:
    """A rank as it was when its stall was reported; ``moved`` is the first other progress that was read."""

    began: float
    progress: int
    raised: int
    moved: int | None = None


def get_resolution(
    reported: ReportedStall, board: StateSnapshot, *, ended: str = "", exit_reason: ExitReason | None = None
) -> tuple[str, str] | None:
    """Return event and words for how a stall went on, None while that is open.

    One beat is not enough for "moves again": the last one of a training that is interrupted looks the same.
    It takes two readings of a training that runs, each further than the one before.

    Parameters
    ----------
    reported:
        What was reported; its ``moved`` is filled in here.
    board:
        The present reading.
    ended, ending:
        How the process ended, empty while it lives, and by which exception the training was left.
    """
    if board.state is State.FAILED:
        by = f" by {exit_reason.error.partition(':')[0]}" if exit_reason is not None else " by an exception"
        return ENDED, f"left its training{by}"
    if ended:
        return ENDED, f"{ended} without having moved again"
    if board.raised != reported.raised:
        return ENDED, "ended that backward by an exception"
    if board.state is State.FINISHED:
        return ENDED, "has ended its training"
    if board.progress == reported.progress:
        return None
    if reported.moved is None:
        reported.moved = board.progress
        return None
    return (MOVES, "moves again") if board.progress != reported.moved else None
