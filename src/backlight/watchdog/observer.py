"""Observers of one process from outside: its shared state, the kernel, its stacks. No torch.

Stacks are taken in rising order of intrusion. The sampler thread inside takes them by itself while it can
run; only when it is silent, because a thread holds the interpreter lock, is the process asked by a signal;
py-spy comes last. A process that is not watched has no shared state and no sampler thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from backlight import clock, processes
from backlight.processes import ProcessEnd, Thread, WaitReason
from backlight.records import Phase
from backlight.watchdog import runtime_dir, stacks
from backlight.watchdog.cause import is_idle, is_moving
from backlight.watchdog.graph_samples import parse_graph_build
from backlight.watchdog.observation import (
    Buckets,
    ExitReason,
    IssuedCollectives,
    Observation,
    Workers,
    main_stacks,
    main_thread,
    parse_buckets,
    parse_exit_reason,
    parse_issued,
)
from backlight.watchdog.shared_state import RankStatus, StateSnapshot, read_state
from backlight.watchdog.stacks import StackSample, ThreadStack
from backlight.watchdog.start_waits import StartWait
from backlight.watchdog.timeouts import (
    REGULAR_STEPS,
    StallLimits,
    is_suspicious,
    timeout_of,
    waiting_timeout_of,
)
from backlight.watchdog.waits import (
    DEPTH,
    LOADER,
    LOADER_WORKER,
    WaitCause,
    children_compute,
    find_named_wait,
    name_wait,
    variables_of,
    worker_stacks,
)

T = TypeVar("T")

SAMPLER_SILENCE_S = 0.7
"""Silence of the sampler thread after which its stacks are read in another way."""

DUMP_PERIOD_S = 0.3
DUMP_TIMEOUT_S = 3.0
DUMP_SHARE = 5.0
"""Pause after a reading of stacks, in times of what it took: py-spy reads the symbols each time."""

MAX_DUMPS = 6
MAX_HISTORY = 240
MAX_USAGES = 40

CPU_WINDOW_S = 1.6
"""Time over which CPU usage is measured, at most; it takes 0.3 s at least."""

RECENT_S = 1.5
"""Age of the snapshots from which the speed of backward is estimated."""

RESUME_CHECKS = 10
"""Tenths of a second that a process has to continue after py-spy has stopped it."""


class RankObserver:
    """One watched process of this machine."""

    def __init__(self, directory: Path, rank: int, limits: StallLimits) -> None:
        self.rank = rank
        self.pidfd = -1
        self.state: StateSnapshot | None = None
        self.end: ProcessEnd | None = None
        self.ended_at = 0.0
        self._directory = directory
        self._path = runtime_dir.state_path(directory, rank)
        self._limits = limits
        self._history: deque[StateSnapshot] = deque(maxlen=MAX_HISTORY)
        # Time, CPU seconds of the process, and its threads by tid.
        self._usages: deque[tuple[int, float, dict[int, Thread]]] = deque(maxlen=MAX_USAGES)
        self._dumps: deque[StackSample] = deque(maxlen=MAX_DUMPS)
        self._next_dump = 0.0
        self._native: list[StackSample] = []
        self._not_collected: dict[str, None] = {}
        self._process: processes.Process | None = None
        self._oom_kills = processes.count_oom_kills()
        self._exit_reason: ExitReason | None = None
        self._ran_py_spy = False
        self._at_start_s = 0.0
        self.start_wait = StartWait(limits)

    def poll(self, *, closely: bool = False) -> None:
        """Read the shared state; read CPU times and, where needed, a stack dump when it looks suspicious."""
        state = read_state(self._path)
        if state is None:
            self._check_end()
            return
        if self.pidfd < 0 and self.end is None:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(state.pid)
            if self.pidfd < 0:
                self.end = ProcessEnd(was_gone=True)
        self.state = state
        if self._check_end():
            return
        if not self._history or state.backwards < REGULAR_STEPS:
            self._at_start_s = state.longest_other_s
        self._history.append(state)
        self.start_wait.update(state)
        if closely or is_suspicious(state, self._limits, self._at_start_s):
            self._examine(state)
        else:
            self._usages.clear()
            self._dumps.clear()
            self._native.clear()

    def close(self) -> None:
        """Close the descriptor of the process."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def is_done(self) -> bool:
        """Whether the rank has ended or reported its end."""
        return self.end is not None or (self.state is not None and self.state.is_closed)

    @property
    def is_examined_closely(self) -> bool:
        """Whether CPU times are being read."""
        return bool(self._usages)

    @property
    def timeout_s(self) -> float | None:
        """The timeout of the present phase, shorter for a thread that only waits; None where it has none."""
        state = self.state
        if state is None:
            return None
        waiting_s = waiting_timeout_of(state, self._limits, self._at_start_s)
        timeout_s = timeout_of(state, self._limits)
        if waiting_s == timeout_s or state.silence_s < (waiting_s or 0.0):
            return waiting_s
        observed: dict[str, Any] = {**self._cpu_usage(state.main_tid)}
        usage = Observation(self.rank, **observed)
        return waiting_s if is_idle(usage, self._limits) else timeout_s

    @property
    def overdue_s(self) -> float | None:
        """Seconds beyond the timeout, None where it has not passed; a closed rank is never overdue."""
        state, timeout_s = self.state, self.timeout_s
        if state is None or self.is_done or timeout_s is None:
            return None
        passed = max(state.silence_s, state.phase_s if state.phase is Phase.BACKWARD else 0.0)
        return passed - timeout_s if passed >= timeout_s else None

    @property
    def has_samples(self) -> bool:
        """Whether the samples suffice to name a line, or none is needed."""
        state, timeout_s = self.state, self.timeout_s
        if state is None or self.is_done or (self._process is not None and self._process.is_stopped):
            return True
        if timeout_s is not None and is_moving(state, timeout_s):
            return True
        samples = self._samples()
        enough = len(samples) >= self._limits.looks
        spans = enough and (samples[-1].at - samples[0].at) / 1e9 >= self._limits.window
        return spans and self._usage_pair() is not None

    @property
    def was_terminated(self) -> bool:
        """Whether a signal ended it that people and launchers use for that."""
        return self.end is not None and self.end.is_termination

    @property
    def exit_reason(self) -> ExitReason | None:
        """The exception by which it left its training, None where there is none."""
        if self._exit_reason is None and self.state is not None and self.state.status is RankStatus.FAILED:
            self._exit_reason = self._read("exit", parse_exit_reason)
        return self._exit_reason

    @property
    def died(self) -> bool:
        """Whether it ended without reporting so, other than by an exit with code 0."""
        reported = self.state is not None and self.state.is_closed
        return self.end is not None and not reported and self.end.status != 0

    def _read(self, kind: str, parse: Callable[[Any], T]) -> T | None:
        return runtime_dir.read_document(runtime_dir.document_path(self._directory, self.rank, kind), parse)

    def _check_end(self) -> bool:
        """Return whether the process has ended, and record how while its parent has not reaped it yet."""
        if self.end is not None or self.pidfd < 0:
            return self.end is not None
        if not select.select([self.pidfd], [], [], 0)[0]:
            return False
        self.ended_at = clock.monotonic()
        status = processes.exit_status(self.pidfd)
        last = processes.read_process(self.state.pid) if self.state is not None else None
        is_same = last is not None and (self._process is None or last.start == self._process.start)
        if status is None and last is not None and last.is_dead and is_same:
            status = last.exit_status
        elif status is None:
            status = processes.exit_status(self.pidfd)  # its parent has read it between the two
        self.end = ProcessEnd(status)
        if self.end.signal == signal.SIGKILL and self.state is not None:
            kills = processes.count_oom_kills()
            for_memory = processes.was_killed_for_memory(self.state.pid)
            is_near = not for_memory and kills is not None and kills > (self._oom_kills or 0)
            self.end = replace(self.end, for_memory=for_memory, near_memory_kill=is_near)
        return True

    def _examine(self, state: StateSnapshot) -> None:
        self._process = processes.read_process(state.pid) or self._process
        threads = {t.tid: t for t in processes.read_threads(state.pid)}
        self._usages.append((clock.monotonic_ns(), self._process.cpu_s if self._process else 0.0, threads))
        is_silent = (state.taken - state.sampler) / 1e9 > SAMPLER_SILENCE_S
        is_stopped = self._process is not None and self._process.is_stopped
        if is_silent and not is_stopped and clock.monotonic() > self._next_dump and self.pidfd >= 0:
            self._dump_stack(state)

    def _dump_stack(self, state: StateSnapshot) -> None:
        """Read the stacks of a process whose sampler is silent, from outside where that is possible."""
        began = clock.monotonic()
        sample, reason = stacks.dump_by_py_spy(state.pid, timeout_s=DUMP_TIMEOUT_S)
        if sample is None:
            tid = self._working_tid(state, self._read("stacks", stacks.parse_samples) or ())
            dump = runtime_dir.dump_path(self._directory, self.rank)
            sample, refused = stacks.dump_by_signal(state.pid, tid, state.working_ident, dump)
            reason = f"{reason}; {refused}"
        if sample is None:
            self._not_collected[reason] = None
        else:
            self._dumps.append(sample)
        now = clock.monotonic()
        self._next_dump = now + max(DUMP_PERIOD_S, DUMP_SHARE * (now - began))

    def take_native_samples(self, count: int = 2, timeout_s: float = 2.0) -> None:
        """Take native stacks with py-spy, which pauses the process for each."""
        if self.state is None or self.end is not None:
            return
        self._ran_py_spy = True
        for _ in range(count):
            sample, reason = stacks.dump_by_py_spy(self.state.pid, native=True, timeout_s=timeout_s)
            if sample is None:
                self._not_collected[reason] = None
                return
            self._native.append(sample)

    def find_native_function(self) -> str:
        """Return the function in C that the main thread is in, empty where it has moved on meanwhile."""
        before = self.state
        if before is None:
            return ""
        self.take_native_samples(1, stacks.NATIVE_TIMEOUT_S)
        now = read_state(self._path)
        if not self._native or now is None or now.progress != before.progress:
            return ""
        return stacks.native_function(self._native[-1], before.main_tid)

    def observe(self) -> Observation:
        """Return the present observation of the rank."""
        state = self.state
        observed: dict[str, Any] = {}
        if state is not None:
            phase = [s for s in self._history if s.phase_since == state.phase_since]
            recent = tuple(s for s in phase if (state.taken - s.taken) / 1e9 < RECENT_S)
            observed["snapshots"] = recent or (state,)
            if state.phase is Phase.BACKWARD:
                observed["graph_build"] = self._read("graph", parse_graph_build)
        samples = self._samples()
        if state is not None and self.end is None:
            tid = self._working_tid(state, samples)
            process = processes.read_process(state.pid)
            observed |= self._cpu_usage(tid)
            observed["wait"] = processes.wait_reason(state.pid, tid) if tid else WaitReason.UNKNOWN
            observed["stopped"] = (
                process is not None and process.is_stopped and self._stays_stopped(state.pid)
            )
            observed["workers"] = _workers(state.pid, stacks=bool(self._usages) and state.phase is Phase.DATA)
            if state.silence_s >= self._limits.floor and state.phase in {Phase.OTHER, Phase.DATA}:
                observed["children_compute"] = children_compute(state.pid)
            if self._usages and tid:
                stack = self._steady_stack(state, samples)
                observed["cause"] = name_wait(state.pid, tid, stack, self._oom_kills)
        return Observation(
            rank=self.rank,
            pid=state.pid if state is not None else 0,
            history=tuple(self._history),
            samples=samples,
            native_samples=tuple(self._native),
            end=self.end if self.died else None,
            ended_at=self.ended_at,
            names=self._read("names", tuple) or (),
            buckets=self._read("buckets", parse_buckets) or Buckets(),
            issued=self._issued(),
            groups=self._read("groups", parse_groups) or {},
            not_collected=tuple(self._not_collected),
            exit_reason=self.exit_reason,
            at_start_s=self._at_start_s,
            **observed,
        )

    def _issued(self) -> IssuedCollectives:
        """Return the collectives that the process has written since it last progressed."""
        issued = self._read("collectives", partial(parse_issued, self.rank))
        recent = issued is not None and self.state is not None and issued.at >= self.state.heartbeat
        return issued if issued is not None and recent else IssuedCollectives()

    def _stays_stopped(self, pid: int) -> bool:
        """Return whether a stopped process stays so: py-spy stops it for a moment."""
        for _ in range(RESUME_CHECKS if self._ran_py_spy else 0):
            clock.sleep(0.1)
            process = processes.read_process(pid)
            if process is None or not process.is_stopped:
                return False
        return True

    def _samples(self) -> tuple[StackSample, ...]:
        samples = self._read("stacks", stacks.parse_samples) or ()
        recent = [s for s in samples if self.state is not None and s.at >= self.state.heartbeat]
        # Old samples of the sampler thread do not show a process in which it has become silent since.
        if self._dumps and (not recent or recent[-1].at < self._dumps[0].at):
            return tuple(self._dumps)
        return tuple(recent)

    def _steady_stack(self, state: StateSnapshot, samples: tuple[StackSample, ...]) -> ThreadStack | None:
        """Return the newest stack of the working thread where the last samples show one wait with a name.

        One sample may meet a lock that is taken at once, such as one of the compiler's cache.
        """
        recent = samples[-int(self._limits.looks) :]
        if len(recent) < self._limits.looks:
            return None
        threads = [stacks.find_working_thread(sample, state.working_ident) for sample in recent]
        waits = {
            (wait[0].name, stack.variables) if stack and (wait := find_named_wait(stack)) else None
            for stack in threads
        }
        return threads[-1] if len(waits) == 1 and None not in waits else None

    def _working_tid(self, state: StateSnapshot, samples: tuple[StackSample, ...]) -> int:
        stack = stacks.find_working_thread(samples[-1], state.working_ident) if samples else None
        if stack is not None and stack.ident != state.main_ident:
            return stack.tid or 0
        return state.main_tid if state.working_ident == state.main_ident else 0

    def _usage_pair(self) -> tuple[Any, Any, float] | None:
        """Return an older and the newest reading of CPU times and the seconds between, None if too short."""
        if len(self._usages) < 2:
            return None
        newest = self._usages[-1]
        oldest = next(u for u in self._usages if (newest[0] - u[0]) / 1e9 <= CPU_WINDOW_S)
        passed = (newest[0] - oldest[0]) / 1e9
        return (oldest, newest, passed) if passed >= 0.3 else None

    def _cpu_usage(self, tid: int) -> dict[str, float | None]:
        """Return the CPU fields of an observation, of the process and of one thread."""
        pair = self._usage_pair()
        if pair is None:
            return {}
        (_, cpu_before, threads_before), (_, cpu_after, threads_after), passed = pair
        usage: dict[str, float | None] = {"cpu": (cpu_after - cpu_before) / passed}
        before, after = threads_before.get(tid), threads_after.get(tid)
        if before is None or after is None:
            return usage
        usage["thread_cpu"] = (after.cpu_s - before.cpu_s) / passed
        states = [threads[tid].state for _, _, threads in self._usages if tid in threads]
        if len(states) >= 4:  # a kernel without run-queue delays: moments at which it ran or was ready to
            usage["scheduled"] = states.count("R") / len(states)
        if after.slices:
            scheduled_ns = after.ran_ns + after.queued_ns - before.ran_ns - before.queued_ns
            usage["scheduled"] = scheduled_ns / 1e9 / passed
            usage["slices_per_s"] = (after.slices - before.slices) / passed
        return usage


def parse_groups(data: Any) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each process group, by the checksum that its collectives carry."""
    return {int(key): tuple(map(int, ranks)) for key, ranks in data.items()}


def _workers(pid: int, *, stacks: bool = False) -> Workers | None:
    """Return the state of the Python child processes of a process, None without any.

    ``stacks``: also those of workers of a DataLoader.
    """
    workers = [c for c in processes.children(pid) if "python" in c.name or c.name.startswith("pt_")]
    reasons = {reason for c in workers if (reason := processes.wait_reason(c.pid, c.pid))}
    if not workers:
        return None
    return Workers(
        len(workers),
        tuple(c.pid for c in workers if c.is_dead),
        tuple(c.pid for c in workers if c.is_stopped),
        tuple(sorted(reasons)),
        worker_stacks([c.pid for c in workers if c.name == LOADER_WORKER]) if stacks else (),
    )


# A process that is not watched

NUM_SAMPLES = 4


def observe_unwatched(
    process: processes.Process, duration_s: float, *, rank: int = -1, native: bool = True
) -> Observation:
    """Observe a process for some seconds by the kernel and py-spy.

    ``native``: also take native stacks at the end, which pauses the process for a moment.
    """
    pid = process.pid
    unseen = [
        "steps, phases, autograd nodes and parameters: the process was not started by backlight",
        "collectives of the ranks: only their Python lines",
    ]
    if not processes.is_traceable(pid):
        unseen.append("what its threads wait for in the kernel: tracing is denied")
    if process.is_dead or process.is_stopped:
        end = ProcessEnd(process.exit_status) if process.is_dead else None
        return Observation(rank, pid, end=end, stopped=process.is_stopped, not_collected=tuple(unseen))
    samples: list[StackSample] = []
    natives: list[StackSample] = []
    before, begin = _threads(pid), clock.monotonic()
    for _ in range(NUM_SAMPLES):
        sample, reason = stacks.dump_by_py_spy(pid)
        if sample is None:
            unseen.append(f"Python stacks: {reason}")
            clock.sleep(duration_s)
            break
        samples.append(sample)
        clock.sleep(duration_s / NUM_SAMPLES)
    after, passed = _threads(pid), clock.monotonic() - begin
    if native and samples:
        sample, reason = stacks.dump_by_py_spy(pid, native=True)
        if sample is None:
            unseen.append(f"native stacks: {reason}")
        else:
            natives.append(sample)
    # Of threads that are new, their whole time counts.
    cpu = {
        tid: (t.cpu_s - (before[tid].cpu_s if tid in before else 0.0)) / passed for tid, t in after.items()
    }
    ran = scheduled = None
    if pid in before and pid in after and after[pid].slices:
        ran = (after[pid].ran_ns - before[pid].ran_ns) / 1e9 / passed
        scheduled = ran + (after[pid].queued_ns - before[pid].queued_ns) / 1e9 / passed
    obs = Observation(
        rank, pid, samples=tuple(samples), native_samples=tuple(natives), cpu=sum(cpu.values()),
        thread_cpu=ran if ran is not None else cpu.get(pid), scheduled=scheduled,
        wait=processes.wait_reason(pid, pid), not_collected=tuple(unseen),
    )  # fmt: skip
    if any(LOADER in frame.file for thread in main_stacks(obs)[-1:] for frame in thread.frames[:DEPTH]):
        obs = replace(obs, workers=_workers(pid, stacks=True))
    cause = _find_cause(obs) if samples else name_wait(pid, pid, None)
    return replace(obs, cause=cause)


def _threads(pid: int) -> dict[int, Thread]:
    return {thread.tid: thread for thread in processes.read_threads(pid)}


def _find_cause(obs: Observation) -> WaitCause | None:
    """Return what the main thread waits for, where its innermost frames, or their name, stay the same."""
    pid, threads = obs.pid, main_stacks(obs)
    names = {named[0].name if (named := find_named_wait(thread)) else None for thread in threads}
    is_named = len(names) == 1 and None not in names  # a lock that is polled has other frames now and then
    is_same = is_named or len({thread.frames[:1] for thread in threads}) == 1
    if len(threads) < len(obs.samples) or not is_same:
        return None
    stack = threads[-1]
    natives = [t for n in obs.native_samples if (t := main_thread(n, pid)) is not None]
    inside = [frame.function for thread in natives for frame in thread.native]
    if find_named_wait(stack) is None and (
        processes.current_call(pid, pid) == (0, 0) or any("builtin_input" in name for name in inside)
    ):
        stack = replace(stack, called="input")
    elif variables_of(stack):
        sample, _ = stacks.dump_by_py_spy(pid, variables=True)
        stack = (main_thread(sample, pid) if sample is not None else None) or stack
    return name_wait(pid, pid, stack)
