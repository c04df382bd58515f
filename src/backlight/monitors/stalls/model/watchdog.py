"""The sidecar: one process per machine that reads the boards and speaks when a rank stands still. No torch.

``python -m backlight.monitors.stalls.model.watchdog PLACE RUN ATTEMPT OFFSET LIMITS`` detaches itself, so
that it is
nobody's child, and ends with the last rank. It never writes to a watched process; if it dies, the training
does not notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from backlight import processes
from backlight.monitors.stalls.model import runtime_dir
from backlight.monitors.stalls.model.ddp_reductions import name_reductions
from backlight.monitors.stalls.model.diagnosis import diagnose, summarize_stacks
from backlight.monitors.stalls.model.emit import file, say
from backlight.monitors.stalls.model.joint_diagnosis import ANSWER, LEAVES, VERDICT
from backlight.monitors.stalls.model.observation import Diagnosis, Observation
from backlight.monitors.stalls.model.peers import HostObservation, Peers, world_of
from backlight.monitors.stalls.model.rank_diagnosis import (
    diagnose_ranks,
    find_mismatch,
    mark_unobserved_ranks,
)
from backlight.monitors.stalls.model.rank_observer import RankObserver
from backlight.monitors.stalls.model.resolution import ReportedStall, get_resolution
from backlight.monitors.stalls.model.stacks import is_compiling
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.timeouts import EXEMPT_PHASES, timeout_s
from backlight.records import DiagnosisKind
from backlight.store.write.watchdog import WatchdogWriter

POLL = 0.25
CLOSE_POLL = 0.15
FIRST_BOARD = 120.0
"""Seconds that the sidecar waits for a first board."""

HOLD = 1.5
"""Seconds beyond the patience in which looks that are still missing are waited for."""

HALF = 0.5
"""Share of the patience with a rank that is left when others wait for it."""

SETTLE = 1.0
"""Seconds after the first exception in which other ranks fail because of it."""

LOOK_TIME = 1.3
"""Seconds that a closer look at ranks that did not look suspicious takes."""


class Watchdog:
    """Watches the ranks whose boards are in one place."""

    def __init__(
        self,
        place: Path,
        run: Path,
        attempt_folder: Path,
        limits: Thresholds,
        offset: int = 0,
        host: str = "",
    ) -> None:
        self._place = place
        self._limits = limits
        self._offset = offset
        self._writer = WatchdogWriter(run, attempt_folder, host)
        self._ranks: dict[int, RankObserver] = {}
        self._quiet: dict[int, int] = {}
        self._stalled: dict[int, ReportedStall] = {}
        self._slow: dict[int, int] = {}
        self._again: dict[int, float] = {}
        self._dead: set[int] = set()
        self._unlike = ""
        self._compared = False
        self._started = time.monotonic()
        self._elsewhere = Peers(self._writer)
        self._observed: HostObservation = ([], {}, {}, 1)
        self._allowed: float | None = None

    def run(self) -> None:
        """Watch until every rank has ended."""
        while self.poll():
            fds = [r.pidfd for r in self._ranks.values() if r.pidfd >= 0 and not r.ended]
            close = any(r.overdue is not None or r._ticks for r in self._ranks.values())
            with contextlib.suppress(OSError, ValueError):
                select.select(fds, [], [], CLOSE_POLL if close else POLL)
        if self._ranks and self._elsewhere.concerned(world_of(self._ranks.values()), len(self._ranks)):
            self._elsewhere.tell(LEAVES, *self._observe(None))  # nobody can ask this machine any more
        self._writer.close()
        runtime_dir.leave(self._place)
        runtime_dir.sweep(processes.alive)

    def poll(self) -> bool:
        """Look once at everything; False when there is nothing more to watch."""
        for rank in runtime_dir.ranks_at(self._place):
            if rank not in self._ranks:
                self._ranks[rank] = RankObserver(self._place, rank, self._limits)
        for one in self._ranks.values():
            one.poll()
        self._over()
        self._compare()
        due = [r for r in self._ranks.values() if self._due(r)]
        if due:
            self._examine(due)
        elif self._elsewhere.concerned(world_of(self._ranks.values()), len(self._ranks)):
            question = self._elsewhere.question()
            if question is not None:
                self._look_closely(others=True)
                self._elsewhere.tell(ANSWER, *self._observe(HALF * float(question.get("allowed") or 0.0)))
        if not self._ranks:
            return time.monotonic() - self._started < FIRST_BOARD and self._place.exists()
        if not self._place.exists():
            return False
        return not all(r.done for r in self._ranks.values())

    def _due(self, one: RankObserver) -> bool:
        failed = one.exit_reason is not None and len(self._ranks) > 1
        if (one.died or failed) and one.rank not in self._dead:
            # The first to go is the cause; what a launcher ends after it is not.
            return not self._dead and self._settled()
        board = one.board
        if board is None or one.overdue is None:
            return False
        if self._quiet.get(one.rank) == board.progress:
            return time.monotonic() >= self._again.get(one.rank, float("inf"))
        self._again.pop(one.rank, None)
        if self._slow.get(one.rank) == board.phase_since:
            allowed = timeout_s(board, self._limits)
            return allowed is not None and board.silence_s >= allowed
        return True

    def _settled(self) -> bool:
        """Tell whether those that a failing rank takes with it have had the time to go."""
        left = [r.exit_reason.at for r in self._ranks.values() if r.exit_reason is not None]
        left += [r.ended_at for r in self._ranks.values() if r.died and r.was_terminated]
        gone = not left or time.monotonic() - min(left) > SETTLE
        return gone or all(r.done for r in self._ranks.values())

    def _compare(self) -> None:
        """Say it when the calls of the ranks do not fit together, also where nothing hangs."""
        snapshots = {rank: r.board for rank, r in sorted(self._ranks.items()) if r.board is not None}
        if self._compared or len(snapshots) < 2 or not any(b.distributed for b in snapshots.values()):
            return
        found = find_mismatch(
            [Observation(rank, snapshots=(board,)) for rank, board in snapshots.items()], {}
        )
        before, self._unlike = self._unlike, "" if found is None else found.claim
        if found is None or (before != found.claim and not all(r.done for r in self._ranks.values())):
            return  # a second reading decides, while there is one to come
        self._compared = True
        observations = name_reductions([r.observation() for _, r in sorted(self._ranks.items())])
        found = mark_unobserved_ranks(found, observations, world_of(self._ranks.values()))
        shown = {
            v.rank: self._ranks[v.rank].evidence(v) for v in observations if found.rank in {None, v.rank}
        }
        file(self._writer, found, observations, shown, offset=self._offset)

    def _over(self) -> None:
        """Say how what stood still went on."""
        for rank, reported in list(self._stalled.items()):
            one = self._ranks[rank]
            if one.board is None:
                continue
            found = get_resolution(reported, one.board, ended=one.ended, exit_reason=one.exit_reason)
            if found is None:
                continue
            event, words = found
            del self._stalled[rank]
            self._quiet.pop(rank, None)
            self._again.pop(rank, None)
            seconds = time.monotonic() - reported.began
            self._writer.event(one.board.step, event, {"rank": rank, "after": seconds, "how": words})
            if not one.died or one.was_terminated:  # a death of its own is a verdict of its own
                say(f"rank {rank} {words}, {seconds:.0f} s after that verdict")

    def _examine(self, due: list[RankObserver]) -> None:
        diagnosis, observations = self._judge(due)
        if diagnosis is not None and diagnosis.kind is DiagnosisKind.UNKNOWN and not diagnosis.waits:
            unclear = [r for r in self._ranks.values() if r.rank == diagnosis.rank]
            late = max((r.overdue or 0.0 for r in due), default=0.0)
            if late < HOLD and not all(r.has_samples for r in unclear):
                return  # on a machine with too much to do looks take their time
            for one in unclear:
                if one.rank not in self._again:
                    one.look_native()
            diagnosis, observations = self._judge(due)
        now = time.monotonic()
        for one in due:
            if one.died or one.exit_reason is not None:
                self._dead.add(one.rank)
        if diagnosis is None:
            return
        cause = self._ranks.get(diagnosis.rank) if diagnosis.rank is not None else None
        if (
            cause is not None
            and cause.died
            and cause.was_terminated
            and all(r.done for r in self._ranks.values())
        ):
            # Somebody ended the whole job: nothing to look into.
            step = None if cause.board is None else cause.board.step
            self._writer.event(step, "ended", {"rank": cause.rank, "how": cause.ended})
            return
        slow = diagnosis.kind is DiagnosisKind.SLOW
        repeated = [r for r in due if r.rank in self._again]
        for one in self._ranks.values():
            board = one.board
            if board is None or one.done or (one not in due and one.overdue is None):
                continue
            self._slow[one.rank] = board.phase_since  # what goes on after a stall is not slow for that
            if slow and one.rank == diagnosis.rank:
                continue
            self._quiet[one.rank] = board.progress
            if slow or diagnosis.kind is DiagnosisKind.UNKNOWN:
                self._again[one.rank] = now + 2 * max(board.silence_s, 1.0)
            else:
                self._again.pop(one.rank, None)
            if slow:
                continue  # it waits for one that moves
            self._stalled[one.rank] = ReportedStall(now, board.progress, board.raised)
        if (slow or diagnosis.kind is DiagnosisKind.UNKNOWN) and repeated:
            return  # said before, and nothing new is known
        if self._compared and diagnosis.claim.startswith(self._unlike):
            return  # said when it was made, before anything stood still
        shown = {v.rank: v for v in observations if v.rank == diagnosis.rank} or {
            v.rank: v for v in observations[:8]
        }
        evidence = (
            {}
            if slow
            else {rank: self._ranks[rank].evidence(observation) for rank, observation in shown.items()}
        )
        file(self._writer, diagnosis, observations, evidence, offset=self._offset)
        if not slow and self._elsewhere.concerned(world_of(self._ranks.values()), len(self._ranks)):
            self._elsewhere.tell(VERDICT, *self._observed)
            self._elsewhere.ask(self._allowed or 0.0)

    def _judge(self, due: list[RankObserver]) -> tuple[Diagnosis | None, list[Observation]]:
        others = any(r not in due and not r.done for r in self._ranks.values())
        if others or not all(r.has_samples for r in due):
            self._look_closely(others=others)
        observations = name_reductions([r.observation() for _, r in sorted(self._ranks.items())])
        allowed = min(
            (a for r in due if r.board is not None and (a := timeout_s(r.board, self._limits)) is not None),
            default=None,
        )
        diagnoses = {
            v.rank: diagnose(v, self._limits, allowed if len(observations) > 1 else None)
            for v in observations
        }
        if allowed is not None and any(j is not None and j.waits for j in diagnoses.values()):
            # A rank for which others wait need not stand still for as long as they do.
            diagnoses = {
                v.rank: diagnoses[v.rank] or diagnose(v, self._limits, HALF * allowed) for v in observations
            }
        gone = any(v.ended or v.exit_reason is not None for v in observations)
        if len(observations) > 1 and not gone and self._excused(observations, diagnoses):
            return None, observations
        groups, world = self._groups(observations), world_of(self._ranks.values())
        self._observed, self._allowed = (observations, diagnoses, groups, world), allowed
        return diagnose_ranks(observations, diagnoses, groups, world), observations

    def _observe(self, allowed: float | None) -> HostObservation:
        """Judge every rank by itself, with a patience of somebody else's, for another machine."""
        observations = name_reductions([r.observation() for _, r in sorted(self._ranks.items())])
        diagnoses = {v.rank: diagnose(v, self._limits, allowed) for v in observations}
        return observations, diagnoses, self._groups(observations), world_of(self._ranks.values())

    def _groups(self, observations: list[Observation]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for observation in observations:
            found = runtime_dir.read_document(
                runtime_dir.document_path(self._place, observation.rank, "groups")
            )
            groups.update({int(k): v for k, v in (found or {}).items()})
        return groups

    def _excused(self, observations: list[Observation], diagnoses: dict[int, Diagnosis | None]) -> bool:
        """Tell whether all wait for a rank that evaluates, writes a checkpoint or compiles."""
        for observation in observations:
            board = observation.board
            if (
                board is None
                or observation.ended
                or observation.stopped
                or diagnoses[observation.rank] is not None
            ):
                continue
            thread = summarize_stacks(observation, self._limits).thread
            if (board.phase in EXEMPT_PHASES and not board.inside) or (
                thread is not None and is_compiling(thread)
            ):
                return True
        return False

    def _look_closely(self, *, others: bool) -> None:
        """Take what a claim about a line needs, for a bounded time, also of ranks that look well."""
        wish = self._place / "look"
        with contextlib.suppress(OSError):
            wish.touch()
        deadline = time.monotonic() + LOOK_TIME
        while time.monotonic() < deadline:
            time.sleep(CLOSE_POLL)
            for one in self._ranks.values():
                one.poll(closely=True)
            if all(r.has_samples for r in self._ranks.values()):
                break
        with contextlib.suppress(OSError):
            wish.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    """Detach and watch."""
    place, run, folder, offset, limits = arguments
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the other has said where it is, or is gone
        os._exit(0)
    os.close(reading)
    os.setsid()
    # What the watched process is told by its terminal or its launcher is not for us: we end with the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        runtime_dir.write_document(Path(place) / "sidecar.json", {"pid": os.getpid()})
        os.close(writing)
        taken = Thresholds().override(json.loads(limits))
        Watchdog(Path(place), Path(run), Path(folder), taken, int(offset)).run()
    except Exception as error:  # noqa: BLE001 - a traceback of ours has no place in somebody's output
        if isinstance(error, FileNotFoundError) and not Path(place).exists():
            return  # the ranks have ended before we began
        say(f"the sidecar has ended: {type(error).__name__}: {error}; a stall is no longer seen")


if __name__ == "__main__":
    main(sys.argv[1:])
