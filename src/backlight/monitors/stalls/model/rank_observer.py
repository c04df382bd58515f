"""What is observed of one rank from outside: its board, the kernel, its stacks. No torch.

Looks come in rising order of intrusion. The helper thread inside takes stacks by itself while it can run;
only when it is silent, because somebody holds the interpreter lock, is the process asked by a signal; py-spy
comes last.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from pathlib import Path

from backlight import processes
from backlight.monitors.stalls.model import ddp_reductions, graph_samples, runtime_dir, stack_dumps
from backlight.monitors.stalls.model.diagnosis import is_moving
from backlight.monitors.stalls.model.exit_reason import ExitReason
from backlight.monitors.stalls.model.exit_reason import read as read_ending
from backlight.monitors.stalls.model.observation import Observation
from backlight.monitors.stalls.model.shared_state import State, StateSnapshot, at, read_state
from backlight.monitors.stalls.model.stacks import (
    StackSample,
    ThreadStack,
    find_working_thread,
    format_sample,
    parse_sampler_stacks,
)
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import is_suspicious, timeout_s

SILENT = 0.7
"""Seconds of silence of the helper thread after which the process is asked by a signal."""

BETWEEN_DUMPS = 0.3
MOST_DUMPS = 6
_HISTORY = 240
LET_GO = 10
"""Tenths of a second that a process has to go on after native stacks were taken of it."""

WAITING = {"a sleep": "sleep"}


class RankObserver:
    """One watched process of this machine."""

    def __init__(self, place: Path, rank: int, limits: Thresholds) -> None:
        self.rank = rank
        self.pidfd = -1
        self.board: StateSnapshot | None = None
        self.ended = ""
        self.ended_at = 0.0
        self._place = place
        self._path = runtime_dir.state_path(place, rank)
        self._limits = limits
        self._boards: deque[StateSnapshot] = deque(maxlen=_HISTORY)
        self._ticks: deque[tuple[int, int, dict[int, processes.Thread]]] = deque(maxlen=40)
        self._dumps: deque[StackSample] = deque(maxlen=MOST_DUMPS)
        self._native: list[StackSample] = []
        self._denied: dict[str, None] = {}
        self._process: processes.Process | None = None
        self._memory_kills = processes.killed_for_memory()
        self._ending: ExitReason | None = None
        self._asked_native = False

    def poll(self, *, closely: bool = False) -> None:
        """Read the board; take CPU times and, where needed, a dump, when something looks wrong."""
        state = read_state(self._path)
        if state is None:
            self._note_end()
            return
        if self.pidfd < 0 and not self.ended:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(state.pid)
            if self.pidfd < 0:
                self.ended = "is gone"
        self.board = state
        if self._note_end():
            return
        self._boards.append(state)
        if closely or is_suspicious(state, self._limits):
            self._watch(state)
        else:
            self._ticks.clear()
            self._dumps.clear()
            self._native.clear()

    def leave(self) -> None:
        """Close what is open."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def done(self) -> bool:
        """Whether nothing more can come of this rank."""
        closed = self.board is not None and self.board.state in {State.FINISHED, State.FAILED}
        return bool(self.ended) or closed

    @property
    def overdue(self) -> float | None:
        """Seconds beyond the patience, None where it is not over; a rank that is closed is never overdue."""
        board = self.board
        if board is None or self.done:
            return None
        allowed = timeout_s(board, self._limits)
        if allowed is None:
            return None
        computing = board.phase == "backward"
        passed = max(board.silence_s, board.phase_s if computing else 0.0)
        return passed - allowed if passed >= allowed else None

    @property
    def has_samples(self) -> bool:
        """Whether there is enough for a claim about a line, or none is going to be made."""
        board = self.board
        if board is None or self.done or (self._process is not None and self._process.stopped):
            return True
        allowed = timeout_s(board, self._limits)
        if allowed is not None and is_moving(board, allowed):
            return True
        samples = self._looks()
        enough = len(samples) >= self._limits.samples
        spans = enough and (samples[-1].at - samples[0].at) / 1e9 >= self._limits.window
        return spans and self._cpu(0)[0] is not None

    @property
    def was_terminated(self) -> bool:
        """Whether a signal ended it that people and launchers use for that."""
        return any(name in self.ended for name in ("SIGTERM", "SIGINT", "SIGHUP"))

    @property
    def exit_reason(self) -> ExitReason | None:
        """How its training was left, where that was by an exception."""
        board = self.board
        if self._ending is None and board is not None and board.state is State.FAILED:
            self._ending = read_ending(
                runtime_dir.read_document(runtime_dir.document_path(self._place, self.rank, "ended"))
            )
        return self._ending

    @property
    def died(self) -> bool:
        """Whether it ended without saying so, by more than an exit of its own that went well."""
        board = self.board
        said = board is not None and board.state in {State.FINISHED, State.FAILED}
        return bool(self.ended) and not said and self.ended != "ended with exit code 0"

    def _note_end(self) -> bool:
        """See whether the process is gone, and how it ended while its parent has not looked yet."""
        if self.ended or self.pidfd < 0:
            return bool(self.ended)
        if not select.select([self.pidfd], [], [], 0)[0]:
            return False
        self.ended_at = time.monotonic()
        code = processes.exit_code_by(self.pidfd)
        last = processes.process(self.board.pid) if self.board is not None else None
        if code is not None:
            self.ended = processes.cause(code)
        elif last is not None and last.dead and (self._process is None or last.start == self._process.start):
            self.ended = processes.cause(last.exit_code)
        else:
            self.ended = "ended without a word (how is not seen from here)"
        kills = processes.killed_for_memory()
        if "SIGKILL" in self.ended and kills is not None and kills > (self._memory_kills or 0):
            self.ended += ", while the kernel was killing for memory"
        return True

    def _watch(self, state: StateSnapshot) -> None:
        self._process = processes.process(state.pid) or self._process
        every = {t.tid: t for t in processes.threads(state.pid)}
        self._ticks.append((time.monotonic_ns(), self._process.ticks if self._process else 0, every))
        newest = self._dumps[-1].at if self._dumps else 0
        silent = min(state.sampler_silence_s, 1e6) > SILENT
        stopped = self._process is not None and self._process.stopped
        if silent and not stopped and (state.taken - newest) / 1e9 > BETWEEN_DUMPS and self.pidfd >= 0:
            self.ask()

    def ask(self) -> None:
        """Ask the process for its stacks by the signal."""
        assert self.board is not None
        sample, reason = stack_dumps.ask_handler(
            self.pidfd, self.board.pid, runtime_dir.dump_path(self._place, self.rank)
        )
        if sample is not None and not sample.threads:
            sample, reason = None, "the dump by signal holds no stack"
        if sample is None:
            self._denied[reason] = None
        else:
            self._dumps.append(sample)

    def look_native(self, times: int = 2) -> None:
        """Take native stacks with py-spy, which pauses the process for each."""
        if self.board is None or self.ended:
            return
        self._asked_native = True
        for _ in range(times):
            sample, reason = stack_dumps.py_spy(self.board.pid, native=True, timeout=2.0)
            if sample is None:
                self._denied[reason] = None
                return
            self._native.append(sample)

    def observation(self) -> Observation:
        """Return all that is known of the rank now."""
        board = self.board
        samples = self._looks()
        own = self._working_tid(samples)
        cpu, own_cpu = self._cpu(own)
        wanted, turns = self._scheduled(own)
        process = processes.process(board.pid) if board is not None and not self.ended else None
        snapshots = tuple(b for b in self._boards if board is not None and b.phase_since == board.phase_since)
        recent = tuple(b for b in snapshots if board is not None and (board.taken - b.taken) / 1e9 < 1.5)
        return Observation(
            rank=self.rank,
            snapshots=recent or ((board,) if board is not None else ()),
            history=tuple(self._boards),
            samples=samples,
            native=tuple(self._native),
            cpu=cpu,
            own_cpu=own_cpu,
            runnable=self._runnable(own),
            wanted=wanted,
            turns=turns,
            wait=processes.waits_for(board.pid, own) if board is not None and own and not self.ended else "",
            ended=self.ended if self.died else "",
            ended_at=self.ended_at,
            stopped=process is not None and process.stopped and self._stays_stopped(process.pid),
            names=tuple(
                runtime_dir.read_document(runtime_dir.document_path(self._place, self.rank, "names")) or ()
            ),
            buckets=ddp_reductions.read(
                runtime_dir.read_document(runtime_dir.document_path(self._place, self.rank, "buckets"))
            ),
            denied=tuple(self._denied),
            workers=self._helpers(board) if board is not None and not self.ended else "",
            graph_build=self._making(board),
            exit_reason=self.exit_reason,
            terminated=self.was_terminated,
        )

    def _stays_stopped(self, pid: int) -> bool:
        """Tell whether a stopped process stays so: py-spy, where we ran it, stops it for a moment."""
        for _ in range(LET_GO if self._asked_native else 0):
            time.sleep(0.1)
            found = processes.process(pid)
            if found is None or not found.stopped:
                return False
        return True

    def history(self) -> tuple[StateSnapshot, ...]:
        """Return the readings of the present phase, for a rate."""
        board = self.board
        return tuple(b for b in self._boards if board is not None and b.phase_since == board.phase_since)

    def evidence(self, observation: Observation) -> str:
        """Return everything as text, the form in which it is kept."""
        parts = []
        if observation.board is not None:
            shown = vars(at(observation.board, observation.board.taken)).copy()
            del shown["collectives"], shown["arrived"]
            shown["typical"] = {p.value: f"{s:.3f} s" for p, s in observation.board.typical.items() if s}
            parts.append("board\n" + "\n".join(f"  {name} = {value}" for name, value in shown.items()))
            parts += [
                f"  collective {c.text}: {'inside' if c.inside else f'{(c.left - c.entered) / 1e6:.1f} ms'}"
                for c in observation.board.collectives
            ]
            if not observation.ended:
                parts.append("threads, from /proc\n" + processes.kernel_stacks(observation.board.pid))
        parts += [
            f"look {n}, {format_sample(sample)}"
            for n, sample in enumerate([*observation.samples[-3:], *observation.native])
        ]
        if observation.denied:
            parts.append(
                "could not be collected\n" + "\n".join(f"  {reason}" for reason in observation.denied)
            )
        return "\n".join(parts)

    def _making(self, board: StateSnapshot | None) -> graph_samples.GraphBuild | None:
        if board is None or board.phase != "backward":
            return None
        return graph_samples.read(
            runtime_dir.read_document(runtime_dir.document_path(self._place, self.rank, "graph"))
        )

    def _looks(self) -> tuple[StackSample, ...]:
        seen = parse_sampler_stacks(
            runtime_dir.read_document(runtime_dir.document_path(self._place, self.rank, "stacks"))
        )
        board = self.board
        recent = [sample for sample in seen if board is not None and sample.at >= board.heartbeat]
        # Old looks of the helper say nothing of a process in which it has become silent since.
        if self._dumps and (not recent or recent[-1].at < self._dumps[0].at):
            return tuple(self._dumps)
        return tuple(recent)

    def _working_tid(self, samples: tuple[StackSample, ...]) -> int:
        board = self.board
        if board is None:
            return 0
        ident = (
            board.backward_ident if board.phase == "backward" and board.backward_ident else board.main_ident
        )
        stack: ThreadStack | None = find_working_thread(samples[-1], ident) if samples else None
        if stack is not None and stack.ident != board.main_ident:
            return stack.tid or 0
        return board.main_tid if ident == board.main_ident else 0

    def _cpu(self, tid: int) -> tuple[float | None, float | None]:
        if len(self._ticks) < 2:
            return None, None
        newest = self._ticks[-1]
        since = next((t for t in self._ticks if (newest[0] - t[0]) / 1e9 <= 1.6), self._ticks[0])
        seconds = (newest[0] - since[0]) / 1e9
        if seconds < 0.3:
            return None, None
        whole = (newest[1] - since[1]) / processes.TICK / seconds
        if tid not in newest[2] or tid not in since[2]:
            return whole, None
        return whole, (newest[2][tid].ticks - since[2][tid].ticks) / processes.TICK / seconds

    def _scheduled(self, tid: int) -> tuple[float | None, float | None]:
        """Return the share of time in which a thread ran or queued, and how often a second it was put on."""
        if len(self._ticks) < 2:
            return None, None
        newest = self._ticks[-1]
        since = next((t for t in self._ticks if (newest[0] - t[0]) / 1e9 <= 1.6), self._ticks[0])
        passed = newest[0] - since[0]
        one, two = since[2].get(tid), newest[2].get(tid)
        if passed < 3e8 or one is None or two is None or not two.turns:
            return None, None
        return (two.ran + two.waited - one.ran - one.waited) / passed, (two.turns - one.turns) / passed * 1e9

    def _runnable(self, tid: int) -> float | None:
        states = [every[tid].state for _, _, every in self._ticks if tid in every]
        return states.count("R") / len(states) if len(states) >= 4 else None

    def _helpers(self, board: StateSnapshot) -> str:
        found = [c for c in processes.children(board.pid) if "python" in c.name or c.name.startswith("pt_")]
        if not found:
            return ""
        dead = [c.pid for c in found if c.dead]
        stopped = [c.pid for c in found if c.stopped]
        parts = [f"{len(found)} worker processes"]
        if dead:
            parts.append(f"{len(dead)} of them dead ({', '.join(map(str, dead))})")
        if stopped:
            parts.append(f"{len(stopped)} of them stopped ({', '.join(map(str, stopped))})")
        waits = {WAITING.get(w, f"wait for {w}") for c in found if (w := processes.waits_for(c.pid, c.pid))}
        if waits:
            parts.append(f"they {', '.join(sorted(waits))}")
        return ", ".join(parts)
