"""Thread inside a watched process that samples its stacks.

It needs the interpreter lock, so it is silent while another thread holds that: its silence is a measurement
too. It never waits for the training thread, nor the training thread for it.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from backlight import clock
from backlight.monitors.stalls.instrument.heartbeat import Heartbeat
from backlight.monitors.stalls.instrument.line_counts import LineCounts, WaitNames
from backlight.processes import queued_s, voluntary_switches
from backlight.records import Phase
from backlight.threads import BackgroundThread, own_threads
from backlight.user_code import is_launcher, is_user_code
from backlight.watchdog.runtime_dir import write_document
from backlight.watchdog.shared_state import PHASES, Slot, StateSnapshot, read_state
from backlight.watchdog.stacks import (
    REGION_LINE,
    Frame,
    StackSample,
    ThreadStack,
    is_backlight,
    recomputed_region,
)
from backlight.watchdog.timeouts import StallLimits, is_suspicious
from backlight.watchdog.waits import DEPTH, variables_of

PERIOD_S = 0.25
"""Time between two readings of the shared state."""

LINE_PERIOD_NS = int(0.8e9 * PERIOD_S)
"""Least time between two samples of the line: those of a slow graph come more often, and would count more."""

BUILD_PERIOD_S = 0.1
"""The same while a graph takes long to build."""

SLOW_BUILD_S = 0.3
"""Time without a heartbeat, outside backward, after which the construction of a graph is slow."""

MAX_SAMPLES = 8
"""Stack samples that are kept for the watchdog."""

NUM_PROBES = 5
PROBE_S = 0.001
"""Sleep between two requests for the interpreter lock."""

STARVED = 0.2
"""Share of that time in a queue for a core, above which a thread's silence tells nothing."""

MAX_FRAMES = 120
MAX_USER_FRAMES = 12
"""Frames of the user's code that a sample of graph construction keeps."""

MAX_THREADS = 160
JOIN_TIMEOUT_S = 2.0

_BACKWARD = PHASES.index(Phase.BACKWARD)
# Where the interpreter checks whether another thread requests the lock, other than after a call.
_SWITCH_OPCODES = frozenset(
    code for name, code in dis.opmap.items() if name == "RESUME" or "JUMP" in name or name.startswith("FOR_")
)


class StackSampler:
    """Writes stacks of this process into the documents ``stacks`` and ``graph_build``, in a thread."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        limits: StallLimits,
        stacks: Path,
        graph_build: Path,
        every_period: Callable[[], None],
        before_sample: Callable[[], None] = lambda: None,
        lines: LineCounts | None = None,
    ) -> None:
        self._lines = lines
        self._wait_names = WaitNames(called_name)
        self._next_line = 0
        self._heartbeat = heartbeat
        self._path = heartbeat.shared_state.path
        self._limits = limits
        self._stacks = stacks
        self._graph_build = graph_build
        self._directory = stacks.parent
        self._every_period = every_period
        self._before_sample = before_sample
        self._stop = threading.Event()
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._phase_since = 0
        self._user_frames: tuple[Frame, ...] = ()
        self._num_written = -1
        self._own_heartbeat = -1
        self._thread = BackgroundThread(target=self._run, name="backlight-stack-sampler")
        self.spent = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one in the middle of a sample is waited for shortly."""
        self._stop.set()
        self._thread.join(timeout=JOIN_TIMEOUT_S)
        if self._lines is not None:
            self._lines.report()

    def _run(self) -> None:
        slots = self._heartbeat.shared_state.slots
        pause_s = 0.0  # the first round starts the watchdog: a process may die young
        while not self._stop.wait(pause_s):
            begin = clock.thread_time()
            try:
                pause_s = self._poll(slots)
                self._every_period()
            except Exception as error:  # noqa: BLE001 - never break the user's training
                if not self._stop.is_set():  # else the watchdog may have removed the directory
                    self._heartbeat.dropped(error)
                return
            self.spent += clock.thread_time() - begin

    def _poll(self, slots: memoryview) -> float:
        now = clock.monotonic_ns()
        slots[Slot.SAMPLER] = now
        # Before the first backward, a script prepares.
        if self._lines is not None and slots[Slot.BACKWARDS] and now >= self._next_line:
            self._next_line = now + LINE_PERIOD_NS
            phase = PHASES[slots[Slot.PHASE]]
            with no_collection():
                at, waits = self._line_now(slots, phase)
            if at:
                self._lines.add(phase, at[0], waits)
        if self._heartbeat.is_counting:
            self._heartbeat.observe_progress(now)
        silence_s = (now - slots[Slot.HEARTBEAT]) / 1e9
        is_slow = silence_s > SLOW_BUILD_S or slots[Slot.HEARTBEAT] == self._own_heartbeat
        building = is_slow and not self._heartbeat.is_counting and self._runs_python(slots)
        if building and not _is_compiling():
            made = self._heartbeat.position.sample(self._user_frames)
            if made and slots[Slot.PHASE] == _BACKWARD:
                # Recomputation progresses as long as it makes nodes, though no node of the graph finishes.
                slots[Slot.PROGRESS] += 1
                slots[Slot.HEARTBEAT] = self._own_heartbeat = clock.monotonic_ns()
        state = read_state(self._path, now)
        # The watchdog or `backlight attach` requests samples by a file; pathlib would be slow here.
        requested = any(name.startswith("sample") for name in os.listdir(self._directory))  # noqa: PTH208
        if state is not None and (requested or is_suspicious(state, self._limits)):
            self._take_sample(state)
            return PERIOD_S / 2
        return BUILD_PERIOD_S if building else PERIOD_S

    def _line_now(self, slots: memoryview, phase: Phase) -> tuple[tuple[Frame, ...], str]:
        """Return the lines of the user's code in the training thread, and what it waits for.

        A frame that is referred to keeps all that its function holds: none outlives this call.
        """
        frame = sys._current_frames().get(slots[Slot.MAIN_IDENT])
        at, near = user_frames(frame), islice(_outwards(frame), MAX_FRAMES)
        return at, self._wait_names.name(near, phase, device=bool(slots[Slot.DEVICE])) if at else ""

    def _runs_python(self, slots: memoryview) -> bool:
        """Return whether the working thread runs Python, which alone makes nodes; record its frames."""
        in_backward = slots[Slot.PHASE] == _BACKWARD
        ident = (in_backward and slots[Slot.BACKWARD_IDENT]) or slots[Slot.MAIN_IDENT]
        with no_collection():
            frame = sys._current_frames().get(ident)
            if in_backward and (frame is None or frame.f_code.co_name.endswith("_engine_run_backward")):
                return False
            self._user_frames = user_frames(frame)
            return True

    def _take_sample(self, state: StateSnapshot) -> None:
        if state.phase_since != self._phase_since:
            self._phase_since = state.phase_since
            self._samples.clear()
            self._num_written = -1
        with contextlib.suppress(OSError):
            self._before_sample()
        ident = state.backward_ident if state.phase is Phase.BACKWARD else state.main_ident
        self._samples.append(asdict(take_sample(state.taken, probed=ident)))
        try:
            if state.phase is Phase.BACKWARD:
                self._write_graph_build(ident)
            write_document(self._stacks, list(self._samples))
        except OSError:
            self._samples.clear()

    def _write_graph_build(self, ident: int) -> None:
        """Write how the graph of the current backward pass was built, where that is new."""
        build = self._heartbeat.position.graph_build()
        if len(build.samples) != self._num_written:
            self._num_written = len(build.samples)
            engine = None
            with no_collection():
                for frame in _outwards(sys._current_frames().get(ident)):
                    if frame.f_code.co_name.endswith("_engine_run_backward"):
                        engine = frame  # the outermost: what lies inside may be recomputation
                caller = user_frames(engine)
            write_document(self._graph_build, asdict(replace(build, caller=caller)))


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while frames of other threads are read.

    Python 3.11 makes the object of a frame on request, and that may start a collection. If a callback of the
    collection lets the other thread run on, the frame ends before its object is complete, and reading it
    crashes. Later versions do not collect there.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname)


def user_frames(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the frames of the user's code, innermost first; those of libraries between them are left out."""
    inside = takewhile(lambda f: not is_launcher(f.f_code.co_filename), _outwards(frame))
    near = islice(inside, 2 * MAX_FRAMES)
    frames = (_frame(f) for f in near if is_user_code(f.f_code.co_filename))
    return tuple(islice(frames, MAX_USER_FRAMES))


def take_sample(now: int, probed: int = 0) -> StackSample:
    """Return the Python stacks of all other threads; of thread ``probed``, also whether it runs Python."""
    skipped = {threading.get_ident(), *own_threads()}
    names = {t.ident: (t.name, t.native_id) for t in threading.enumerate()}
    threads = []
    with no_collection():
        for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]:
            name, tid = names.get(ident, ("", None))
            if ident in skipped:
                continue
            code, at = frame.f_code.co_code, frame.f_lasti
            # At such an instruction only threads that run Python are switched; elsewhere it may be in a call.
            runs_bytecode = True if 0 <= at < len(code) and code[at] in _SWITCH_OPCODES else None
            frames = tuple(map(_frame, islice(_outwards(frame), MAX_FRAMES)))
            called = called_name(frame) if ident == probed and not runs_bytecode else ""
            stack = ThreadStack(ident, frames, name, tid, runs_bytecode, called=called)
            variables = _texts(frame, variables_of(stack))
            if recomputed_region(stack) is not None:
                variables += _region_line(frame)
            threads.append(replace(stack, variables=variables))
    for index, thread in enumerate(threads):
        if thread.ident == probed and not thread.runs_bytecode:
            threads[index] = replace(thread, runs_bytecode=probe_bytecode(thread.tid))
    return StackSample(now, "sampler", tuple(threads))


def _texts(frame: FrameType, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the texts that local variables of these names hold in a stack."""
    if not names:
        return ()
    texts = ((name, f.f_locals.get(name)) for f in islice(_outwards(frame), DEPTH) for name in names)
    return tuple((name, text) for name, text in texts if type(text) is str)


def _region_line(frame: FrameType) -> tuple[tuple[str, str], ...]:
    """Return the line of the innermost checkpointed region that is followed and runs again."""
    for outer in islice(_outwards(frame), MAX_FRAMES):
        if is_backlight(outer.f_code.co_filename):
            line = getattr(outer.f_locals.get("region"), "line", "")
            if type(line) is str and line:
                return ((REGION_LINE, line),)
    return ()


def called_name(frame: FrameType) -> str:
    """Return the name of the function in C whose call a frame is in, such as ``wait``; empty if not known.

    Of a wrapper of backlight, the name under which it was called.
    """
    while frame.f_back is not None and is_backlight(frame.f_code.co_filename):
        frame = frame.f_back
    at, name = frame.f_lasti, ""
    positions = list(frame.f_code.co_positions())
    if not 0 <= at // 2 < len(positions):
        return ""
    begin = positions[at // 2][0], positions[at // 2][2]
    # The expression `a.b.wait()` begins where `a` does: the last name that is loaded from there is called.
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= at:
            return name
        where = instruction.positions
        if (
            where is not None
            and (where.lineno, where.col_offset) == begin
            and isinstance(instruction.argval, str)
        ):
            name = instruction.argval
    return ""


def probe_bytecode(tid: int | None) -> bool | None:
    """Return whether a thread runs Python, by requesting the interpreter lock a few times.

    A thread that runs Python releases the lock only after the switch interval, and then waits for it itself,
    which the kernel counts; a thread in native code does neither. None where the two signs disagree, and
    where the thread spent much of the time in a queue for a core: it could not have taken the lock either.
    """
    before, queued_before = voluntary_switches(tid), queued_s(tid)
    delays = []
    start = clock.perf_counter()
    for _ in range(NUM_PROBES):
        begin = clock.perf_counter()
        clock.sleep(PROBE_S)
        delays.append(clock.perf_counter() - begin - PROBE_S)
    switches = None if before is None else (voluntary_switches(tid) or 0) - before
    interval = sys.getswitchinterval()
    typical = sorted(delays)[NUM_PROBES // 2]
    if typical > 0.6 * interval and (switches is None or switches >= NUM_PROBES - 1):
        return True
    queued = queued_s(tid)
    waited = 0.0 if queued is None or queued_before is None else queued - queued_before
    starved = waited > STARVED * (clock.perf_counter() - start)
    if typical < 0.3 * interval and (switches is None or switches <= 1) and not starved:
        return False
    return None


def _is_compiling() -> bool:
    """Return whether a thread of this process runs dynamo."""
    if "torch._dynamo" not in sys.modules:
        return False
    with no_collection():
        return any(
            f.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py")
            for frame in sys._current_frames().values()
            for f in islice(_outwards(frame), 200)
        )
