"""What is observed of one process, and the verdict that is made of it, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.monitors.stalls.model import graph_samples
from backlight.monitors.stalls.model.exit_reason import ExitReason
from backlight.monitors.stalls.model.shared_state import StateSnapshot
from backlight.monitors.stalls.model.stacks import StackSample
from backlight.records import DiagnosisKind, Phase

HIGH, MEDIUM, LOW = "high", "medium", "low"


@dataclass(frozen=True)
class Observation:
    """What is known of one process over the last seconds.

    Attributes
    ----------
    boards, history:
        Readings of its board of the last moments in this phase, and all that are kept, oldest first.
    looks, native:
        Its Python stacks; and stacks with native frames, where they were taken.
    cpu, own_cpu:
        Cores in use by all its threads, and by the thread that works; None where not known.
    runnable:
        Share of the moments at which that thread was running or ready to run: on a machine with too much to
        do a thread that computes gets less than a core.
    wanted, turns:
        Share of the time in which that thread ran or queued for a processor, and how often in a second it was
        put on one. A thread that waits does neither; one that is starved queues; one that competes for the
        interpreter lock of its own process wakes at every switch.
    wait:
        What that thread sleeps for, as the kernel says.
    ended, ended_at, stopped:
        How it ended, empty while it lives, and when (monotonic seconds); whether it is stopped by a signal.
    names:
        Names of its parameters by row.
    denied:
        What could not be collected, and why.
    helpers:
        What its own child processes do, in words.
    making:
        What was seen of the building of the graph whose backward is under way.
    buckets, reducing:
        Rows of the parameters in each bucket of DDP, and in words which reduction it would wait for.
    ending, told:
        The exception by which its training was left; whether a signal ended it that people and launchers
        use to end what is left of a job.
    """

    rank: int
    snapshots: tuple[StateSnapshot, ...] = ()
    history: tuple[StateSnapshot, ...] = ()
    samples: tuple[StackSample, ...] = ()
    native: tuple[StackSample, ...] = ()
    cpu: float | None = None
    own_cpu: float | None = None
    runnable: float | None = None
    wanted: float | None = None
    turns: float | None = None
    wait: str = ""
    ended: str = ""
    ended_at: float = 0.0
    stopped: bool = False
    names: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    workers: str = ""
    graph_build: graph_samples.GraphBuild | None = None
    buckets: tuple[tuple[int, ...], ...] = ()
    reducing: str = "a reduction inside backward"
    exit_reason: ExitReason | None = None
    terminated: bool = False

    @property
    def board(self) -> StateSnapshot | None:
        """The newest reading."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def last_parameter(self) -> str | None:
        """The parameter whose gradient arrived last in this backward; none where it is over."""
        board = self.board
        if board is None or board.phase is not Phase.BACKWARD or not 0 <= board.row < len(self.names):
            return None
        return self.names[board.row]


def in_phase(phase: Phase) -> str:
    """Return ``in backward``, or ``between phases`` where a process is in none that has a name."""
    return "between phases" if phase is Phase.OTHER else f"in {phase}"


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with what it says and what would show that it is wrong."""

    kind: DiagnosisKind
    phase: Phase
    claim: str
    refuted_if: str
    next_check: str
    confidence: str = MEDIUM
    rank: int | None = None
    line: str | None = None
    parameter: str | None = None
    module: str | None = None
    waits: bool = False
