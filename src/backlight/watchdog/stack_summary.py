"""The stack samples of an observation, taken together: what stays the same in all of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.watchdog.observation import Observation
from backlight.watchdog.stacks import (
    Frame,
    StackSample,
    ThreadStack,
    find_working_thread,
    in_native_backward,
    user_frame,
)
from backlight.watchdog.timeouts import StallLimits

MAX_IDLE_SCHEDULED = 0.2
"""Share of the time on a core or in its queue above which a thread does not just wait."""

MIN_CORE_SHARE = 0.2
"""Share of its runnable time for which a thread had a core, below which its samples show where it waits."""


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
    enough = enough and not is_starved(obs.thread_cpu, obs.scheduled)  # it has hardly run between the samples
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
