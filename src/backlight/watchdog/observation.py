"""Observation of one rank: live, by `attach`, in a job, or by a dump of its flight recorder. No torch."""

from __future__ import annotations

import enum
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backlight import clock
from backlight.processes import ProcessEnd, WaitReason
from backlight.records import Phase
from backlight.redaction import Redaction
from backlight.watchdog.collectives import Carried, CollectiveRecord, Dump, Reduction, Sizes
from backlight.watchdog.flight_recorder import parse_dump
from backlight.watchdog.graph_samples import GraphBuild
from backlight.watchdog.shared_state import Collective, StateSnapshot
from backlight.watchdog.stacks import (
    Frame,
    StackSample,
    ThreadStack,
    find_working_thread,
    in_collective,
    in_native_backward,
    user_frame,
)
from backlight.watchdog.timeouts import StallLimits
from backlight.watchdog.waits import WaitCause, WorkerStack

MAX_MESSAGE_CHARS = 300
"""Characters of an exception's message that are kept."""


@dataclass(frozen=True)
class Buckets:
    """Parameters that collectives carry together.

    ``rows`` and ``numels``: of each bucket of DDP in the order of reduction, the rows of its parameters and
    its elements. ``shard_rows`` and ``shard_numels``: the same of each group of FSDP2, with the elements that
    one rank holds.
    """

    rows: tuple[tuple[int, ...], ...] = ()
    numels: tuple[int, ...] = ()
    shard_rows: tuple[tuple[int, ...], ...] = ()
    shard_numels: tuple[int, ...] = ()


@dataclass(frozen=True)
class IssuedCollectives:
    """Collectives as the process itself has recorded them while it was suspicious."""

    at: int = 0  # monotonic nanoseconds
    open_calls: tuple[int, ...] = ()  # numbers of asynchronous calls that have not completed
    dump: Dump | None = None  # of the flight recorder


class PeerFailure(enum.StrEnum):
    """Call in which a rank failed because of another rank or the network."""

    NONE = ""
    COLLECTIVE = "a collective"
    BACKWARD = "backward"


@dataclass(frozen=True)
class ExitReason:
    """The exception by which a rank left its training, or the launcher that ended it."""

    kind: str  # type of the exception
    message: str  # in one line
    at: float  # monotonic seconds
    line: str | None = None  # the innermost line of the user's code
    function: str = ""
    inside: PeerFailure = PeerFailure.NONE
    interrupted: bool = False
    out_of_memory: bool = False

    @property
    def error(self) -> str:
        """Type and message in one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True)
class Workers:
    """Python child processes of a process, and what those that sleep wait for."""

    count: int
    dead: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    waits: tuple[WaitReason, ...] = ()
    stacks: tuple[WorkerStack, ...] = ()  # of those in the user's code, where they were read


@dataclass(frozen=True)
class Observation:
    """Observations of one rank over the last seconds; what a source does not report is empty or None."""

    rank: int  # -1 for a process that is none, or whose rank is not known
    pid: int = 0
    snapshots: tuple[StateSnapshot, ...] = ()  # the last moments of this phase, oldest first
    history: tuple[StateSnapshot, ...] = ()  # all that are kept
    samples: tuple[StackSample, ...] = ()
    native_samples: tuple[StackSample, ...] = ()
    # Cores in use by all its threads, and by the working thread; None where not known.
    cpu: float | None = None
    thread_cpu: float | None = None
    # Share of the time in which the working thread ran or queued for a core, and time slices per second. A
    # thread that waits does neither; a starved one queues; one that competes for the interpreter lock of its
    # own process wakes at every switch.
    scheduled: float | None = None
    slices_per_s: float | None = None
    wait: WaitReason = WaitReason.UNKNOWN  # of the working thread
    end: ProcessEnd | None = None  # None while it lives
    ended_at: float = 0.0  # monotonic seconds
    stopped: bool = False
    names: tuple[str, ...] = ()  # of its parameters by row
    not_collected: tuple[str, ...] = ()  # and why
    workers: Workers | None = None
    graph_build: GraphBuild | None = None
    buckets: Buckets = Buckets()
    issued: IssuedCollectives = IssuedCollectives()
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # ranks by the checksum of a group
    cause: WaitCause | None = None  # of its wait, by frames and system state
    reduction: Reduction = Reduction()  # noqa: RUF009 - frozen; for which it would wait
    exit_reason: ExitReason | None = None
    children_compute: bool = False  # processes that it has started
    at_start_s: float = 0.0  # longest pause between phases when it was first observed

    @property
    def state(self) -> StateSnapshot | None:
        """The newest snapshot; None for a process that is not watched."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def phase(self) -> Phase:
        """The phase of the newest snapshot, ``OTHER`` without one."""
        return self.state.phase if self.state is not None else Phase.OTHER

    @property
    def calls(self) -> Dump | None:
        """The calls that its shared state holds; only a call that has not returned is open."""
        state = self.state
        if state is None:
            return None
        records = tuple(self._record(call) for call in state.collectives)
        return Dump(
            self.rank or 0, records, is_whole=not state.collectives or state.collectives[0].index <= 0
        )

    def _record(self, call: Collective) -> CollectiveRecord:
        ranks = self.groups.get(call.group, ())
        is_world = self.state is None or not ranks or len(ranks) >= self.state.world_size
        return CollectiveRecord(
            str(call.group), ranks, call.number, str(call.kind), completed=not call.inside,
            label="default_pg" if is_world else None, call=call.call, arguments=call.shape,
        )  # fmt: skip

    @property
    def current_call(self) -> CollectiveRecord | None:
        """The newest blocking collective that has not returned, None where there is none."""
        call = self.state.current_call if self.state is not None else None
        return self._record(call) if call is not None else None

    @property
    def last_call(self) -> CollectiveRecord | None:
        """The last collective call, where it has failed."""
        calls = self.state.collectives if self.state is not None else ()
        return self._record(calls[-1]) if calls and calls[-1].failed else None

    @property
    def pending(self) -> CollectiveRecord | None:
        """The first collective that this rank has issued and that has not completed."""
        records = self.dump.records if self.dump is not None else ()
        still_open = [r for r in records if not r.completed]
        if still_open:  # a receive may have been posted long before the loop waits for it
            return min(still_open, key=lambda r: r.is_point_to_point)
        calls = self.state.collectives if self.state is not None else ()
        return next((self._record(c) for c in calls if c.index in self.issued.open_calls), None)

    @property
    def waits_in(self) -> CollectiveRecord | Reduction:
        """In what a rank waits that waits for others."""
        if self.current_call is not None:
            return self.current_call
        in_backward = self.phase is Phase.BACKWARD
        return self.reduction if in_backward else self.pending or self.reduction

    @property
    def dump(self) -> Dump | None:
        """What its flight recorder holds; of open collectives with the parameters that they carry."""
        dump = self.issued.dump
        if dump is None:
            return None
        return replace(dump, records=tuple(_with_parameters(r, self) for r in dump.records))

    @property
    def holds_interpreter(self) -> bool:
        """Whether the sampler thread could not run since the last heartbeat: the interpreter lock is held."""
        state = self.state
        return state is not None and all(
            s.source != "sampler" for s in self.samples if s.at >= state.heartbeat
        )

    @property
    def backwards(self) -> int:
        """Number of completed backward passes."""
        return self.state.backwards if self.state is not None else 0

    @property
    def last_parameter(self) -> str | None:
        """The parameter whose gradient arrived last in the current backward pass."""
        state = self.state
        if state is None or state.phase is not Phase.BACKWARD or not 0 <= state.row < len(self.names):
            return None
        return self.names[state.row]


# Exceptions

_PEER_ERROR = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|timed? ?out|nccl (error|watchdog)"
    r"|remote (process|worker)",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemory|out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE
)


def exit_reason_of(error: BaseException) -> ExitReason:
    """Return how ``error`` ends a training run."""
    frames = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    stack = ThreadStack(0, tuple(reversed(frames)))
    user = user_frame(stack)
    text = Redaction().text(" ".join(str(error).split())[:MAX_MESSAGE_CHARS])
    kind = type(error).__name__
    return ExitReason(
        kind=kind,
        message=text,
        at=clock.monotonic(),
        line=str(user) if user is not None else None,
        function=user.qualified_name if user is not None else "",
        inside=_where_peers_failed(error, stack, text),
        interrupted=isinstance(error, (KeyboardInterrupt, GeneratorExit)),
        out_of_memory=isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(f"{kind} {text}")),
    )


def _where_peers_failed(error: BaseException, stack: ThreadStack, text: str) -> PeerFailure:
    # A wrong argument raises ValueError or TypeError; errors of the backend are neither.
    if not isinstance(error, RuntimeError):
        return PeerFailure.NONE
    # DDP's wrapper raises where this rank has left something out, which is an error of its own.
    if in_collective(stack) and "nn/parallel/" not in stack.frames[0].file.replace("\\", "/"):
        return PeerFailure.COLLECTIVE
    if _PEER_ERROR.search(text):
        return PeerFailure.BACKWARD if in_native_backward(stack) else PeerFailure.COLLECTIVE
    return PeerFailure.NONE


def parse_exit_reason(data: Any) -> ExitReason:
    """Return the exit reason that a rank has written."""
    return ExitReason(**{**data, "inside": PeerFailure(data["inside"])})


# Reductions of DDP: the reducer works in native code and waits for all buckets at the end of backward. A rank
# starts the reduction of a bucket once it has all its gradients, so a rank waits for the buckets that another
# lacks.


def parse_buckets(data: Any) -> Buckets:
    """Return the buckets that a rank has written."""

    def rows(name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(int, bucket)) for bucket in data[name])

    def numels(name: str) -> tuple[int, ...]:
        return tuple(map(int, data[name]))

    return Buckets(rows("rows"), numels("numels"), rows("shard_rows"), numels("shard_numels"))


def parse_issued(rank: int, data: Any) -> IssuedCollectives:
    """Return the collectives that a rank has written."""
    dump = parse_dump(rank, data["dump"], data["groups"]) if data["dump"] is not None else None
    return IssuedCollectives(int(data["at"]), tuple(map(int, data["open"])), dump)


def name_reductions(observations: Sequence[Observation]) -> list[Observation]:
    """Return the observations with the reduction for which each rank may wait."""
    return [replace(obs, reduction=_reduction(obs, observations)) for obs in observations]


def _reduction(obs: Observation, observations: Sequence[Observation]) -> Reduction:
    buckets, state = obs.buckets.rows, obs.state
    if state is None or state.phase is not Phase.BACKWARD or not buckets:
        return Reduction()
    started = [i for i, bucket in enumerate(buckets) if _is_complete(bucket, state.arrived)]
    if not started:
        return Reduction()
    pending = _pending_bucket(obs)
    if pending in started:
        return Reduction(_bucket(obs, pending))
    lacking = [i for i in started if any(_lacks(other, obs, buckets[i]) for other in observations)]
    if lacking or len(started) == 1:
        return Reduction(_bucket(obs, (lacking or started)[0]))
    return Reduction(num_started=len(started))


def _pending_bucket(obs: Observation) -> int:
    """Return the bucket whose all-reduce is recorded as open, -1 if that is not known."""
    records = obs.issued.dump.records if obs.issued.dump is not None else ()
    pending = next((r for r in records if not r.completed and r.operation == "all_reduce"), None)
    return _only(obs.buckets.numels, pending.inputs) if pending is not None else -1


def _only(numels: Sequence[int], sizes: Sizes) -> int:
    """Return the index of the only one of ``numels`` that a flat tensor of these sizes has, else -1."""
    flat = len(sizes) == 1 and len(sizes[0]) == 1
    indices = [i for i, numel in enumerate(numels) if flat and numel == sizes[0][0]]
    return indices[0] if len(indices) == 1 else -1


def _with_parameters(record: CollectiveRecord, obs: Observation) -> CollectiveRecord:
    """Return an open collective with the parameters that it carries, where its size shows that."""
    if record.completed:
        return record
    buckets, name = obs.buckets, record.operation
    if name == "all_reduce" and (index := _only(buckets.numels, record.inputs)) >= 0:
        # DDP alone reduces what has the size of a bucket, and in backward.
        return replace(record, phase=record.phase or Phase.BACKWARD, carries=_bucket(obs, index))
    shard = record.inputs if "gather" in name else record.outputs if "reduce_scatter" in name else ()
    if (index := _only(buckets.shard_numels, shard)) >= 0:
        return replace(record, carries=_carried(obs, buckets.shard_rows[index]))
    return record


def _bucket(obs: Observation, index: int) -> Carried:
    rows = obs.buckets.rows
    return replace(_carried(obs, rows[index]), bucket=index + 1, num_buckets=len(rows))


def _carried(obs: Observation, rows: Sequence[int]) -> Carried:
    names = [obs.names[row] if row < len(obs.names) else f"parameter {row}" for row in rows]
    return Carried(names[0], names[-1], len(names))


def _is_complete(bucket: Sequence[int], arrived: bytes) -> bool:
    return bool(bucket) and all(row < len(arrived) and arrived[row] for row in bucket)


def _lacks(other: Observation, obs: Observation, bucket: Sequence[int]) -> bool:
    """Return whether ``other`` has not reached the reduction in which ``obs`` is."""
    theirs, mine = other.state, obs.state
    if other.rank == obs.rank or theirs is None or mine is None or not theirs.arrived:
        return False
    done = theirs.backwards + (theirs.phase is Phase.BACKWARD)
    if done != mine.backwards + 1:
        return done < mine.backwards + 1
    return not _is_complete(bucket, theirs.arrived)


MAX_IDLE_SCHEDULED = 0.2
"""Share of the time on a core or in its queue above which a thread does not just wait."""

MIN_CORE_SHARE = 0.2
"""Share of its runnable time for which a thread had a core, below which its samples show where it waits."""

MIN_RUN_S = 0.2
"""Seconds that a starved thread has to run between its samples, for them to show what it does."""

MIN_NATIVE = 2
"""Native stacks without which they do not show what a thread runs."""


@dataclass(frozen=True)
class StackSummary:
    """The stack samples of the current phase, taken together."""

    threads: tuple[ThreadStack, ...]
    same_line: bool
    same_function: bool
    frame: Frame | None
    native: bool
    runs_bytecode: bool | None

    @property
    def thread(self) -> ThreadStack | None:
        """The working thread in the newest sample."""
        return self.threads[-1] if self.threads else None


def summarize_stacks(obs: Observation, limits: StallLimits) -> StackSummary:
    """Summarise the samples of the current phase: the working thread in each, and what stays the same."""
    state = obs.state
    ident = state.working_ident if state is not None else 0
    since = max(state.phase_since, state.heartbeat) if state is not None else 0
    samples = [sample for sample in obs.samples if sample.at >= since]
    threads = [find_working_thread(sample, ident) for sample in samples]
    if not any(threads):
        threads = [sample.threads[-1] for sample in samples if sample.threads]
    taken = tuple(t for t in threads if t is not None)
    enough = len(taken) >= limits.looks and (samples[-1].at - samples[0].at) / 1e9 >= limits.window
    enough = enough and not hardly_ran(obs, samples)
    frames = [user_frame(t) for t in taken]
    newest = frames[-1] if frames else None
    bytecode = [t.runs_bytecode for t in taken if t.runs_bytecode is not None]
    runs_bytecode = any(bytecode) if any(bytecode) or 3 * len(bytecode) >= 2 * len(taken) > 0 else None
    if runs_bytecode is None and _is_in_native_code(obs, ident, since, newest):
        runs_bytecode = False
    return StackSummary(
        threads=taken,
        same_line=enough and all(f == newest for f in frames),
        same_function=enough
        and newest is not None
        and all(f is not None and (f.file, f.function) == (newest.file, newest.function) for f in frames),
        frame=newest,
        native=bool(taken) and all(in_native_backward(t) for t in taken),
        runs_bytecode=runs_bytecode,
    )


def _is_in_native_code(obs: Observation, ident: int, since: int, frame: Frame | None) -> bool:
    """Return whether native stacks show a call at this line that does not hold the interpreter lock."""
    samples = [sample for sample in obs.native_samples if sample.at >= since]
    threads = [find_working_thread(sample, ident) for sample in samples]
    return len(threads) >= MIN_NATIVE and all(
        t is not None and bool(t.native) and t.holds_gil is False and user_frame(t) == frame for t in threads
    )


def is_starved(ran: float | None, scheduled: float | None) -> bool:
    """Return whether a thread, by its shares of the time, hardly got the core that it wanted."""
    if ran is None or scheduled is None:
        return False
    return scheduled > MAX_IDLE_SCHEDULED and ran < MIN_CORE_SHARE * scheduled


def hardly_ran(obs: Observation, samples: Sequence[StackSample]) -> bool:
    """Return whether the thread has hardly run between samples, which then show where it waits for a core.

    On a busy machine it has run long enough when the samples are far enough apart.
    """
    if not is_starved(obs.thread_cpu, obs.scheduled):
        return False
    passed_s = (samples[-1].at - samples[0].at) / 1e9 if samples else 0.0
    return (obs.thread_cpu or 0.0) * passed_s < MIN_RUN_S


# A process that is not watched


def main_thread(sample: StackSample, pid: int) -> ThreadStack | None:
    """Return the stack of the main thread of a process."""
    return next((t for t in sample.threads if t.tid == pid), sample.threads[0] if sample.threads else None)


def main_stacks(obs: Observation) -> list[ThreadStack]:
    """Return the stacks of the main thread in the samples of a process."""
    return [t for sample in obs.samples if (t := main_thread(sample, obs.pid)) is not None]


def changes_stack(obs: Observation) -> bool:
    """Return whether the stack of the main thread changes between samples."""
    return len({thread.frames for thread in main_stacks(obs)}) > 1


def holds_one_stack(obs: Observation) -> bool:
    """Return whether the main thread ran, and held the interpreter lock with one stack in every sample."""
    # The whole stack: the user's line alone also stays the same throughout a long import.
    threads = main_stacks(obs)
    same = len({thread.frames if thread.holds_gil else None for thread in threads}) == 1
    is_held = same and bool(threads[0].holds_gil) and len(threads) == len(obs.samples) > 1
    return is_held and not is_starved(obs.thread_cpu, obs.scheduled)
