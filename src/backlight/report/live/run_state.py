"""How a run stands that is looked at while it may still be written."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backlight.records import RunStatus
from backlight.store.read.run import Run
from backlight.text import number


class Standing(enum.StrEnum):
    """What a live view says of a run, in one word."""

    READING = "reading"
    WAITING = "waiting"
    LIVE = "live"
    ENDED = "ended"
    STALE = "stale"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Stand:
    """The standing, and the sentence that says what it does not say by itself."""

    word: Standing
    detail: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will come, so that nobody needs to ask again."""
        return self.word is Standing.ENDED


READING = Stand(Standing.READING, "The run is being read.")
EMPTY = Stand(Standing.WAITING, "Waiting for the first step: no run began in this folder yet.")


def stand_of(run: Run) -> Stand:
    """Tell how ``run`` stands, by the status of its newest attempt."""
    last = run.last_step()
    steps = "no step was recorded" if last < 0 else f"the last recorded step is {number(last)}"
    status = run.status
    if status is RunStatus.RUNNING:
        if last < 0:
            return Stand(
                Standing.WAITING, "Waiting for the first step: the run began, nothing is recorded yet."
            )
        return Stand(Standing.LIVE, f"The training runs; {steps}.")
    if status is RunStatus.KILLED:
        return Stand(Standing.STALE, f"The process ended without closing the run; {steps}.")
    if status is RunStatus.UNKNOWN:
        return Stand(Standing.STALE, f"Nothing was heard of the writer for a while; {steps}.")
    how = "ended with an exception" if status is RunStatus.FAILED else "ended"
    return Stand(Standing.ENDED, f"The training {how}; {steps}.")
