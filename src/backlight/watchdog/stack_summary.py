"""The stack samples of a phase, taken together: what stays the same in all of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.watchdog import stacks
from backlight.watchdog.observation import Observation
from backlight.watchdog.stacks import Frame, ThreadStack
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
    threads = [stacks.find_working_thread(sample, ident) for sample in samples]
    if not any(threads):
        threads = [sample.threads[-1] for sample in samples if sample.threads]
    known = tuple(t for t in threads if t is not None)
    enough = len(known) >= limits.looks and (samples[-1].at - samples[0].at) / 1e9 >= limits.window
    enough = enough and not is_starved(obs.thread_cpu, obs.scheduled)  # it has hardly run between the samples
    frames = [stacks.user_frame(t) for t in known]
    newest = frames[-1] if frames else None
    bytecode = [t.runs_bytecode for t in known if t.runs_bytecode is not None]
    runs_bytecode = any(bytecode) if any(bytecode) or 3 * len(bytecode) >= 2 * len(known) > 0 else None
    if runs_bytecode is None and _is_in_native_code(obs, ident, since, newest):
        runs_bytecode = False
    return StackSummary(
        threads=known,
        same_line=enough and all(f == newest for f in frames),
        same_function=enough
        and newest is not None
        and all(f is not None and (f.file, f.function) == (newest.file, newest.function) for f in frames),
        frame=newest,
        native=bool(known) and all(stacks.in_native_backward(t) for t in known),
        runs_bytecode=runs_bytecode,
    )


def _is_in_native_code(obs: Observation, ident: int, since: int, frame: Frame | None) -> bool:
    """Return whether native stacks show a call at this line that does not hold the interpreter lock."""
    samples = [sample for sample in obs.native_samples if sample.at >= since]
    threads = [stacks.find_working_thread(sample, ident) for sample in samples]
    return len(threads) >= MIN_NATIVE and all(
        t is not None and bool(t.native) and t.holds_gil is False and stacks.user_frame(t) == frame
        for t in threads
    )


def is_starved(ran: float | None, scheduled: float | None) -> bool:
    """Return whether a thread, by its shares of the time, hardly got the core that it wanted."""
    if ran is None or scheduled is None:
        return False
    return scheduled > MAX_IDLE_SCHEDULED and ran < MIN_CORE_SHARE * scheduled
