"""Why ranks make no progress, as data: the cause of one rank and the decision over all. No torch.

No sentence is made here: :mod:`backlight.watchdog.text` describes both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from backlight.processes import ProcessEnd, WaitReason
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.collectives import Awaited, CollectiveRecord, Match
from backlight.watchdog.graph_samples import NodeShare
from backlight.watchdog.observation import ExitReason, PeerFailure, Workers
from backlight.watchdog.stacks import Frame, RecomputedRegion
from backlight.watchdog.waits import WaitCause

HIGH, MEDIUM, LOW = "high", "medium", "low"


class What(enum.StrEnum):
    """What keeps a rank or a job from progress, or that nothing does."""

    # One rank
    ENDED = enum.auto()
    STOPPED = enum.auto()
    MOVES = enum.auto()
    NAMED_WAIT = enum.auto()
    SLOW_BACKWARD = enum.auto()
    IN_COLLECTIVE = enum.auto()  # in a call that other ranks have to enter
    SYNCHRONIZES = enum.auto()  # the host waits for the device or a handle, while a collective is open
    OUTSIDE_BACKWARD = enum.auto()
    IDLE = enum.auto()
    REDUCES = enum.auto()  # native code of backward waits for other ranks
    SPINS = enum.auto()
    LONG_CALL = enum.auto()
    LONG_OPERATION = enum.auto()
    # One rank in a backward pass of which the observation decides nothing, and why
    STARVED_OF_LOCK = enum.auto()
    STARVED_OF_CORES = enum.auto()
    PAUSES = enum.auto()
    STACKS_DIFFER = enum.auto()
    PYTHON_OR_NATIVE = enum.auto()
    WAITS_FOR_DEVICE = enum.auto()
    ONE_OR_MANY_OPERATIONS = enum.auto()
    # A process that is not watched
    NO_STACKS = enum.auto()
    FEW_STACKS = enum.auto()
    STACK_CHANGES = enum.auto()
    STARVED = enum.auto()
    WAITS = enum.auto()
    NATIVE_BACKWARD = enum.auto()
    COMPUTES = enum.auto()
    # Several ranks
    LEFT_BY_ERROR = enum.auto()
    TRAINING_ENDED = enum.auto()
    TRAINING_FAILED = enum.auto()
    EXTRA_CALL = enum.auto()
    FAILED_TOGETHER = enum.auto()
    STRAGGLER = enum.auto()
    MATCHED = enum.auto()  # what the collectives of the ranks show
    OTHER_CALL = enum.auto()
    ALL_WAIT = enum.auto()
    OPEN_RECORDS = enum.auto()
    ALL_COMPLETED = enum.auto()
    NO_RANK_DIFFERS = enum.auto()
    JOB_MOVES = enum.auto()
    NOT_COME = enum.auto()


@dataclass(frozen=True)
class BackwardSpeed:
    """Position and speed of a backward pass whose nodes finish."""

    phase_s: float
    nodes_done: int
    nodes_total: int
    nodes_per_s: float | None = None
    remaining_s: float | None = None
    recomputed: int = 0
    share: NodeShare | None = None
    custom_calls: int = 0


@dataclass(frozen=True)
class Behind:
    """A rank has made fewer backward passes than the others."""

    rank: int
    backwards: int
    others: int


@dataclass(frozen=True)
class Failure:
    """Ranks that failed in one call with one message."""

    ranks: tuple[int, ...]
    call: CollectiveRecord | PeerFailure
    message: str


@dataclass(frozen=True)
class Cause:
    """What keeps a rank or a job from progress, with its circumstances; ``waits``: for other ranks."""

    kind: DiagnosisKind
    what: What
    phase: Phase = Phase.OTHER
    confidence: str = MEDIUM
    rank: int | None = None
    pid: int = 0
    step: int | None = None
    line: str | None = None
    parameter: str | None = None
    module: str | None = None
    waits: bool = False
    is_watched: bool = True
    frame: Frame | None = None
    region: RecomputedRegion | None = None  # in whose recomputation it is
    same_line: bool = False  # in every sample
    is_sampled: bool = False  # stacks of Python were taken
    thread: str = ""  # name of the working thread where that is not the main thread
    wait: WaitReason = WaitReason.UNKNOWN
    holds_interpreter: bool = False
    function: str = ""  # in C, in which it is
    reached: int = 0  # parameters whose gradient has arrived, and how many are expected
    expected: int = 0
    end: ProcessEnd | None = None
    named: WaitCause | None = None
    call: Awaited | None = None  # in which it waits, or that it waits for
    workers: Workers | None = None
    speed: BackwardSpeed | None = field(default=None, compare=False)
    silence_s: float = field(default=0.0, compare=False)
    cpu: float | None = field(default=None, compare=False)
    # Of several ranks
    ranks: tuple[int, ...] = ()  # that it is about, and others
    others: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    match: Match | None = None
    usual: Awaited | None = None  # in which a majority waits
    count: int = 0
    error: ExitReason | None = None
    running: tuple[tuple[int, Phase, int], ...] = ()  # rank, phase and step
    lines: tuple[tuple[tuple[int, ...], Frame | None], ...] = ()  # of ranks with the same stack
    is_store_read: bool = False


@dataclass(frozen=True)
class Decision:
    """What keeps the ranks of a job from progress: the cause, and what follows from it."""

    cause: Cause
    named: int | None = None  # rank of which the cause is one, where there are several
    shows_pid: bool = False
    waiting: Mapping[int, Awaited | None] = field(default_factory=dict)
    later: tuple[int, ...] = ()  # ranks that ended after it
    failures: tuple[Failure, ...] = ()
    noticed: tuple[int, ProcessEnd] | None = None  # the first rank that ended because of it
    behind: Behind | None = None
    unobserved: tuple[int, int] | None = None  # ranks that may be the cause, of how many
    no_dump: tuple[int, ...] = ()  # the same, of dumps
