"""Communication of a device, and how much of it computation hides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.intervals import union
from backlight.trace.kinds import Kind
from backlight.trace.timeline import Step, Timeline


@dataclass(frozen=True)
class Overlap:
    """Nanoseconds in which a device computes, communicates, and does both.

    ``communication - overlapped`` is exposed: in that time nothing else ran on the device.
    """

    computation: int
    communication: int
    overlapped: int

    @property
    def exposed(self) -> int:
        """Communication that no computation hides."""
        return self.communication - self.overlapped


def overlap(timeline: Timeline, step: Step, number: int) -> Overlap:
    """Return computation, communication and their overlap on one device in one window.

    Copies count as computation here: while one runs the device is not merely waiting for others.
    """
    device = timeline.device
    here = device.device == number
    communicates = device.of_kind(Kind.COMMUNICATION)
    talk = union(device.start[here & communicates], device.end[here & communicates])
    work = union(device.start[here & ~communicates], device.end[here & ~communicates])
    talk, work = talk.within(step.start, step.end), work.within(step.start, step.end)
    both = int(work.covered(talk.start, talk.end).sum()) if len(talk.start) else 0
    return Overlap(work.length, int(np.int64(talk.length)), both)
