"""The helper thread inside a watched process: it looks where a look from inside is cheapest.

It needs the interpreter lock, so it is silent while somebody holds that: its silence is a measurement too.
It never waits for the training and the training never waits for it.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from backlight.monitors.stalls.instrument.heartbeat import Heartbeat
from backlight.monitors.stalls.model.runtime_dir import write_document
from backlight.monitors.stalls.model.shared_state import PHASES, Slot, StateSnapshot, read_state
from backlight.monitors.stalls.model.stacks import is_library
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import is_suspicious
from backlight.records import Phase

PERIOD = 0.25
"""Seconds between two looks at the board."""

QUICK = 0.1
"""Seconds between two looks while a graph takes long to build."""

SLOW_BUILD = 0.3
"""Seconds without a beat, outside backward, after which a graph is taken to be long in the building."""

LOOKS = 8
"""Looks at the stacks that are kept for the sidecar."""

PROBES = 5
PROBE = 0.001
"""Seconds of sleep between two questions for the interpreter lock."""

DEEPEST = 120
USERS = 12
"""Frames of the user's own code that a look at the building of a graph keeps."""

MOST_THREADS = 160

_BACKWARD = PHASES.index(Phase.BACKWARD)
# Where the interpreter looks whether another thread wants its turn, other than after a call.
_TURNS = frozenset(
    code for name, code in dis.opmap.items() if name == "RESUME" or "JUMP" in name or name.startswith("FOR_")
)


class StackSampler:
    """Runs beside the training.

    Parameters
    ----------
    beats, path, limits:
        The beats of this process, its board's file, and the thresholds that decide when to look closer.
    stacks, making:
        Documents that take the latest looks, and those at the building of a graph.
    chores:
        Called once per period, for instance to see whether the sidecar lives; must not raise.
    """

    def __init__(
        self,
        heartbeats: Heartbeat,
        path: Path,
        limits: Thresholds,
        stacks: Path,
        graph_build: Path,
        chores: Callable[[], None],
    ) -> None:
        self._beats = heartbeats
        self._path = path
        self._limits = limits
        self._stacks = stacks
        self._making = graph_build
        self._place = stacks.parent
        self._chores = chores
        self._stop = threading.Event()
        self._looks: deque[dict[str, Any]] = deque(maxlen=LOOKS)
        self._since = 0
        self._where: tuple[tuple[str, int, str], ...] = ()
        self._kept = -1
        self._beat = -1
        self._thread = threading.Thread(target=self._run, name="backlight-witness", daemon=True)
        self.spent = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it may be in the middle of a look, for which nobody waits long."""
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        slots = self._beats.board.slots
        pause = 0.0  # the first round starts the sidecar: a process may die young
        while not self._stop.wait(pause):
            begin = time.thread_time()
            try:
                pause = self._look(slots)
                self._chores()
            except Exception as error:  # noqa: BLE001 - never break the user's training
                self._beats.dropped(error)
                return
            self.spent += time.thread_time() - begin

    def _look(self, slots: memoryview) -> float:
        now = time.monotonic_ns()
        slots[Slot.SAMPLER] = now
        silence_s = (now - slots[Slot.HEARTBEAT]) / 1e9
        building = (silence_s > SLOW_BUILD or slots[Slot.HEARTBEAT] == self._beat) and self._python(slots)
        if building and not self._compiling():
            made = self._beats.position.sample(self._where)
            if made and slots[Slot.PHASE] == _BACKWARD:
                # What backward computes again moves as long as it makes nodes, though none of the graph ends.
                slots[Slot.PROGRESS] += 1
                slots[Slot.HEARTBEAT] = self._beat = time.monotonic_ns()
        state = read_state(self._path, now)
        if state is not None and (is_suspicious(state, self._limits) or self._wished()):
            self._keep(state)
            return PERIOD / 2
        return QUICK if building else PERIOD

    def _python(self, slots: memoryview) -> bool:
        """Tell whether nodes may be made now, which only Python code does, and note where it is."""
        inside = slots[Slot.PHASE] == _BACKWARD
        ident = (inside and slots[Slot.BACKWARD_IDENT]) or slots[Slot.MAIN_IDENT]
        frame = sys._current_frames().get(ident)
        if inside and (frame is None or frame.f_code.co_name.endswith("_engine_run_backward")):
            return False
        self._where = users(frame)
        return True

    def _wished(self) -> bool:
        """Tell whether somebody outside asks for looks: the sidecar, or `backlight attach`."""
        return any(name.startswith("look") for name in os.listdir(self._place))  # noqa: PTH208 - ten a second

    def _compiling(self) -> bool:
        if "torch._dynamo" not in sys.modules:
            return False
        return any(
            _inside(frame, "torch/_dynamo/convert_frame.py") for frame in sys._current_frames().values()
        )

    def _keep(self, state: StateSnapshot) -> None:
        if state.phase_since != self._since:
            self._since = state.phase_since
            self._looks.clear()
            self._kept = -1
        taken = sample(state.taken)
        ident = state.backward_ident if state.phase is Phase.BACKWARD else state.main_ident
        for thread in taken["threads"]:
            if thread["ident"] == ident and not thread["runs_bytecode"]:
                thread["runs_bytecode"] = runs_bytecode(thread["tid"])
        self._looks.append(taken)
        try:
            if state.phase is Phase.BACKWARD:
                self._keep_making(ident)
            write_document(self._stacks, list(self._looks))
        except OSError:
            self._looks.clear()

    def _keep_making(self, ident: int) -> None:
        """Write what was seen of the building of the graph whose backward is under way, if that is news."""
        found = self._beats.position.graph_build()
        if len(found["samples"]) != self._kept:
            self._kept = len(found["samples"])
            write_document(
                self._making, {**found, "caller": users(_caller(sys._current_frames().get(ident)))}
            )


def users(frame: FrameType | None) -> tuple[tuple[str, int, str], ...]:
    """Return the frames of the user's own code, innermost first; a library's may lie between them."""
    out: list[tuple[str, int, str]] = []
    depth = 0
    while frame is not None and len(out) < USERS and depth < DEEPEST * 2:
        code = frame.f_code
        if not is_library(code.co_filename):
            out.append((code.co_filename, frame.f_lineno or 0, code.co_qualname))
        frame, depth = frame.f_back, depth + 1
    return tuple(out)


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of the engine: what lies inside may be recomputation."""
    found = None
    while frame is not None:
        if frame.f_code.co_name.endswith("_engine_run_backward"):
            found = frame
        frame = frame.f_back
    return found


def sample(now: int) -> dict[str, Any]:
    """Return the Python stacks of all other threads of this process, innermost frame first.

    ``turn`` of a thread is True where its innermost frame stands at a place of the byte code at which
    only threads that run Python take turns, None where it stands in a call.
    """
    own = threading.get_ident()
    names = {t.ident: (t.name, t.native_id) for t in threading.enumerate()}
    threads = []
    for ident, frame in list(sys._current_frames().items())[:MOST_THREADS]:
        name, tid = names.get(ident, ("", None))
        if ident == own or name.startswith("backlight-"):
            continue
        code = frame.f_code.co_code
        at = frame.f_lasti
        runs_bytecode = True if 0 <= at < len(code) and code[at] in _TURNS else None
        threads.append(
            {
                "ident": ident,
                "name": name,
                "tid": tid,
                "runs_bytecode": runs_bytecode,
                "frames": _frames(frame),
            }
        )
    return {"at": now, "source": "sampler", "threads": threads}


def runs_bytecode(tid: int | None) -> bool | None:
    """Tell whether a thread runs Python, by asking for the interpreter lock a few times.

    A thread that runs Python gives the lock up only after the switch interval, and then has to wait for
    it itself, which the kernel counts. A thread in native code that has let go of the lock does neither.
    None where the two signs do not agree, as on a machine with too much to do.
    """
    before = _waits(tid)
    late = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        time.sleep(PROBE)
        late.append(time.perf_counter() - begin - PROBE)
    waited = None if before is None else (_waits(tid) or 0) - before
    interval = sys.getswitchinterval()
    typical = sorted(late)[PROBES // 2]
    if typical > 0.6 * interval and (waited is None or waited >= PROBES - 1):
        return True
    if typical < 0.3 * interval and (waited is None or waited <= 1):
        return False
    return None


def _waits(tid: int | None) -> int | None:
    try:
        status = Path(f"/proc/self/task/{tid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = [line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(found[0].split()[1]) if found else None


def _frames(frame: FrameType | None) -> list[list[Any]]:
    out: list[list[Any]] = []
    while frame is not None and len(out) < DEEPEST:
        out.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname])
        frame = frame.f_back
    return out


def _inside(frame: FrameType | None, file: str) -> bool:
    depth = 0
    while frame is not None and depth < 200:
        if frame.f_code.co_filename.endswith(file):
            return True
        frame, depth = frame.f_back, depth + 1
    return False
