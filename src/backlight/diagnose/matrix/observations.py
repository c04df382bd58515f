"""What was seen of one case, as frozen records without any judgement."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


class Ended(enum.StrEnum):
    """How a case came to its end."""

    EXITED = "exited"
    OVER = "over"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Place:
    """One frame of a stack; ``native`` frames have no Python line."""

    function: str
    file: str
    line: int
    native: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread at one moment, innermost frame first. ``sample`` counts the dumps of its process.

    ``active`` and ``holds_lock`` (the interpreter lock) are None where the source cannot tell.
    """

    source: str
    sample: int
    pid: int
    thread: str
    frames: tuple[Place, ...]
    active: bool | None = None
    holds_lock: bool | None = None
    main: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote."""
        return cls(**{**data, "frames": tuple(Place(**frame) for frame in data["frames"])})


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process of a case when its time was over; ``cpu`` in cores over the last half window.

    ``delay`` is the time that its threads waited for a processor, in the same unit.
    """

    pid: int
    parent: int
    command: str
    state: str
    threads: int
    cpu: float
    delay: float = 0.0
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a case had come at the begin, the middle and the end of the window; ``by`` counted it.

    ``total`` is 0 where nobody said how much there is to do.
    """

    by: str
    before: int
    middle: int
    after: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The time before the limit, of ``seconds`` in all.

    Progress counts at its begin, middle and end, since a case that moved only in the first half may
    hang since. ``cpu`` (cores, over the whole tree) and ``output_bytes`` are of the second half.
    """

    seconds: float
    cpu: float
    output_bytes: int
    progress: tuple[Progress, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote."""
        return cls(**{**data, "progress": tuple(Progress(**p) for p in data["progress"])})


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of evidence, relative to the folder of the matrix."""

    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Evidence that could not be collected, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class StallSeen:
    """A finding of the rule ``stall`` in the run directory of the case.

    ``over`` where it moved again since.
    """

    verdict: str
    claim: str
    phase: str = ""
    line: str = ""
    rank: int | None = None
    parameter: str = ""
    refuted_if: str = ""
    path: str = ""
    over: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that was seen of one case. ``exit_code`` is negative where a signal ended it."""

    ended: Ended
    seconds: float
    limit: float
    exit_code: int | None = None
    reason: str = ""
    success: bool | None = None
    window: Window | None = None
    processes: tuple[ProcessSeen, ...] = ()
    stacks: tuple[Stack, ...] = ()
    stalls: tuple[StallSeen, ...] = ()
    error: str = ""
    error_line: str = ""
    tail: tuple[str, ...] = ()
    files: tuple[Kept, ...] = ()
    missing: tuple[Missing, ...] = ()
    ended_by: tuple[str, ...] = ()
    arrived: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote.

        Raises
        ------
        KeyError
            If a part is missing.
        TypeError
            If a part is unknown.
        """
        rows: dict[str, Any] = dict(data)
        rows["ended"] = Ended(rows["ended"])
        rows["window"] = Window.from_json(rows["window"]) if rows["window"] else None
        rows["processes"] = tuple(ProcessSeen(**{**p, "waits": tuple(p["waits"])}) for p in rows["processes"])
        rows["stacks"] = tuple(Stack.from_json(s) for s in rows["stacks"])
        rows["stalls"] = tuple(StallSeen(**s) for s in rows["stalls"])
        rows["files"] = tuple(Kept(**f) for f in rows["files"])
        rows["missing"] = tuple(Missing(**m) for m in rows["missing"])
        for key in ("tail", "ended_by"):
            rows[key] = tuple(rows[key])
        return cls(**rows)
