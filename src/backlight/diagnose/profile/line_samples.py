"""Host time of each phase by source line, from samples of the training thread's stack.

The phase clock measures how long a phase takes; the samples divide that among the lines of the user's code.
A thread takes no sample while another holds the interpreter lock, and gets it when the holder's call returns:
each sample therefore weighs the time since the one before it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from backlight import clock
from backlight.diagnose.profile.step_summary import StepProfile, StepTime
from backlight.monitors.stalls.instrument.stack_sampler import no_collection, user_frames
from backlight.records import Phase
from backlight.threads import BackgroundThread
from backlight.user_code import SourceLine, user_line
from backlight.watchdog.stacks import Frame

PERIOD_S = 0.01
"""Mean time between two samples."""

MIN_SAMPLES = 20
"""Samples in steady steps below which no line is reported: a share then has a standard error of 11 %."""

SWITCH_S = 0.0005
"""Time after which Python code passes the interpreter lock on, while samples are taken. With Python's 5 ms a
sample would be up to 5 ms late: what runs in Python would count for a later call that releases the lock.
"""

IDLE_THREADS = frozenset({"TMonitor"})
"""Types of threads that sleep all the time: that of tqdm."""

_SPREAD = (5**0.5 - 1) / 2
# Periods of .5 to 1.5 times the mean, evenly spread: equal ones may beat with the steps, and a generator of
# random numbers is not ours to draw from.

JOIN_TIMEOUT_S = 2.0

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Stack = tuple[Frame, ...]
"""Frames of the user's code, innermost first."""


@dataclass(frozen=True)
class Sample:
    """One sample: number of the clocked step, phase and stack, and the seconds since the one before it."""

    step: int
    phase: str
    stack: Stack
    seconds: float


@dataclass(frozen=True)
class LineTime:
    """Host time of a phase in one line, calls into libraries included, in milliseconds per step.

    ``share`` is that of the phase, from ``samples`` weighted by time; ``ms`` is that share of the phase's
    part of the median step, so that the lines of a phase add up to it.
    """

    phase: str
    line: str
    function: str
    samples: int
    share: float
    ms: float


@dataclass(frozen=True)
class StackTime:
    """Host milliseconds per step of one stack of the user's code in a phase, outermost frame first."""

    phase: str
    frames: tuple[tuple[str, int, str], ...]
    ms: float


@dataclass(frozen=True)
class LineSampling:
    """Extent of the sampling: samples in steady steps, CPU seconds of the sampler per second of training.

    ``longest_gap_ms`` is the longest time without a sample: a long one means that the lock was held. A sample
    may be late by ``delay_ms``, which Python code before a call that releases the lock is short of.
    """

    samples: int
    cost: float
    longest_gap_ms: float
    delay_ms: float


class LineSampler:
    """Samples the stack of the thread that constructs it, in a thread of its own.

    ``phase`` returns the phase that the training thread is in; ``step`` is the number of the clocked step,
    which the training thread sets. Meanwhile the interpreter's switch interval is ``SWITCH_S``, unless the
    script has other threads: those would hold up the training thread for less time than they really do.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.samples: list[Sample] = []
        self.step = 0
        self.error: Exception | None = None
        self.cost = 0.0
        self.others: list[str] = []
        self.delay_s = self._before = sys.getswitchinterval()
        self._phase = phase
        self._ident = threading.get_ident()
        # A wait for a lock costs a fraction of one for an Event; it is released to end the thread.
        self._goes_on = threading.Lock()
        self._goes_on.acquire()
        self._thread = BackgroundThread(target=self._run, name="backlight-line-sampler")

    def start(self) -> None:
        """Start the thread."""
        self.others = [
            thread.name
            for thread in threading.enumerate()
            if thread.ident != self._ident and type(thread).__name__ not in IDLE_THREADS
        ]
        self._before = sys.getswitchinterval()
        if not self.others:
            sys.setswitchinterval(min(SWITCH_S, self._before))
        self.delay_s = sys.getswitchinterval()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if sys.getswitchinterval() == self.delay_s:  # not changed by the script
            sys.setswitchinterval(self._before)
        if self._goes_on.locked():
            self._goes_on.release()
        self._thread.join(timeout=JOIN_TIMEOUT_S)

    def _run(self) -> None:
        began = last = clock.perf_counter()
        stacks: dict[Stack, Stack] = {}
        at = 0.0
        try:
            while not self._goes_on.acquire(timeout=PERIOD_S * (0.5 + at)):
                at = (at + _SPREAD) % 1.0
                now, step, phase = clock.perf_counter(), self.step, self._phase()
                with no_collection():
                    stack = _user_stack(self._ident)
                self.samples.append(Sample(step, str(phase), stacks.setdefault(stack, stack), now - last))
                last = now
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self.error = error
        self.cost = clock.thread_time() / max(clock.perf_counter() - began, PERIOD_S)


def _user_stack(ident: int) -> Stack:
    frame = sys._current_frames().get(ident)
    frames = user_frames(frame)
    if frames or frame is None:
        return frames
    line = user_line(frame)  # a script that is an installed package
    return () if line is None else (Frame(line.path, line.number, line.function),)


def settle(samples: Sequence[Sample], steps: Sequence[StepTime], profile: StepProfile) -> list[Sample]:
    """Return the samples of the steady steps, each with the name of its phase in ``profile``.

    What follows a forward is loss only if a backward came, which was not known at the moment of the sample.
    """
    settled = []
    for sample in samples:
        if not profile.warmup <= sample.step < len(steps):
            continue
        phase = sample.phase
        if phase == Phase.LOSS and phase not in steps[sample.step].phases:
            phase = Phase.OTHER
        if phase == Phase.OTHER and phase not in profile.phases:
            phase = "between"
        if phase in profile.phases:
            settled.append(Sample(sample.step, str(phase), sample.stack, sample.seconds))
    return settled


def line_times(samples: Sequence[Sample], profile: StepProfile) -> tuple[LineTime, ...]:
    """Return the lines of every phase, those with the most time first."""
    seconds, counts = _weigh(samples, lambda sample: sample.stack[0] if sample.stack else None)
    times = []
    for (phase, frame), (share, ms) in _scaled(seconds, profile).items():
        line, function = ("", "") if frame is None else (_location(frame), frame.function)
        # A function inside another has the name of that in front.
        function = function.rpartition("<locals>.")[2]
        times.append(LineTime(phase, line, function, counts[phase, frame], share, ms))
    return tuple(sorted(times, key=lambda line: -line.ms))


def stack_times(samples: Sequence[Sample], profile: StepProfile) -> tuple[StackTime, ...]:
    """Return the stacks of every phase, those with the most time first."""
    seconds, _ = _weigh(samples, lambda sample: sample.stack)
    stacks = [
        StackTime(phase, tuple((_location(f).rpartition(":")[0], *f[1:]) for f in reversed(stack)), ms)
        for (phase, stack), (_, ms) in _scaled(seconds, profile).items()
    ]
    return tuple(sorted(stacks, key=lambda times: -times.ms))


def sampling(sampler: LineSampler, samples: Sequence[Sample]) -> LineSampling:
    """Return the extent of what was sampled."""
    gap = max((sample.seconds for sample in samples), default=0.0)
    return LineSampling(len(samples), sampler.cost, 1e3 * gap, 1e3 * sampler.delay_s)


def speedscope(name: str, stacks: Sequence[StackTime]) -> dict[str, Any]:
    """Return a flame graph in the format of speedscope.app: phases at the root, then frames."""
    frames: dict[tuple[str, str, int], int] = {}

    def number(name: str, file: str = "", line: int = 0) -> int:
        return frames.setdefault((name, file, line), len(frames))

    rows = [
        [
            number(times.phase.replace("_", " ")),
            *(number(f"{name} ({PurePath(file).name}:{at})", file, at) for file, at, name in times.frames),
        ]
        for times in stacks
    ]  # fmt: skip
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "backlight",
        "shared": {
            "frames": [
                {"name": name, **({"file": file, "line": line} if file else {})}
                for name, file, line in frames
            ]
        },
        "profiles": [
            {
                "type": "sampled",
                "name": "host time of a step",
                "unit": "milliseconds",
                "startValue": 0,
                "endValue": sum(times.ms for times in stacks),
                "samples": rows,
                "weights": [times.ms for times in stacks],
            }
        ],
    }


def _location(frame: Frame) -> str:
    return str(SourceLine(*frame))


def _weigh(
    samples: Sequence[Sample], key: Callable[[Sample], Any]
) -> tuple[dict[tuple[str, Any], float], Counter[tuple[str, Any]]]:
    seconds: defaultdict[tuple[str, Any], float] = defaultdict(float)
    counts: Counter[tuple[str, Any]] = Counter()
    for sample in samples:
        at = (sample.phase, key(sample))
        seconds[at] += sample.seconds
        counts[at] += 1
    return seconds, counts


def _scaled(
    seconds: dict[tuple[str, Any], float], profile: StepProfile
) -> dict[tuple[str, Any], tuple[float, float]]:
    """Return the share of its phase and the milliseconds of a median step of each key."""
    if profile.step is None:
        return {}
    whole: defaultdict[str, float] = defaultdict(float)
    for (phase, _), spent in seconds.items():
        whole[phase] += spent
    scaled = {}
    for (phase, key), spent in seconds.items():
        share = spent / whole[phase] if whole[phase] else 0.0
        scaled[phase, key] = share, share * profile.phases[phase].share * profile.step.median_ms
    return scaled
