"""Watchdog process: one per machine, observes its ranks and reports stalls. No torch.

``python -m backlight.watchdog.watchdog DIRECTORY RUN ATTEMPT OFFSET LIMITS PID STREAM SUMMARY``
detaches itself and ends with the last rank. It changes no watched process; if it dies, training continues
unwatched. With SUMMARY it prints that of a run whose script a signal has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from backlight import clock
from backlight.records import DiagnosisKind
from backlight.store.format.schema import ENDED
from backlight.threads import unblock_signals
from backlight.watchdog import runtime_dir
from backlight.watchdog.borrowed_stderr import STDERR, BorrowedStderr, ancestors
from backlight.watchdog.diagnosis import (
    HELD,
    MIN_PAUSE_S,
    diagnose,
    name_native_function,
)
from backlight.watchdog.emit import ReportedStall, emit, find_resolution, log
from backlight.watchdog.end_guard import END_TIMEOUT_S, EndGuard
from backlight.watchdog.observation import Diagnosis, Observation, name_reductions
from backlight.watchdog.peers import ANSWERED, DIAGNOSED, LEFT, HostObservation, Peers
from backlight.watchdog.rank_diagnosis import (
    UNOBSERVED,
    diagnose_ranks,
    find_mismatch,
    open_to_unobserved_ranks,
)
from backlight.watchdog.rank_observer import RankObserver
from backlight.watchdog.stack_summary import summarize_stacks
from backlight.watchdog.stacks import is_compiling
from backlight.watchdog.timeouts import EXEMPT_PHASES, StallLimits

if TYPE_CHECKING:
    from backlight.store.write.watchdog import WatchdogWriter

POLL_S = 0.25
CLOSE_POLL_S = 0.15

FIRST_RANK_TIMEOUT_S = 120.0
"""Time that the watchdog waits for the first rank."""

SAMPLES_TIMEOUT_S = 1.5
"""Time beyond a stall timeout in which missing stack samples are waited for."""

PEER_TIMEOUT_SHARE = 0.5
"""Share of the stall timeout that applies to a rank for which others wait."""

SETTLE_S = 1.0
"""Time after the first exception in which other ranks fail because of it."""

CLOSE_LOOK_S = 1.3
"""Duration of a close examination of ranks that were not suspicious."""

SUMMARY_TIMEOUT_S = 10.0
"""That time where it prints the summary of the run: the rules and the report have to be imported."""

MAX_EVIDENCE = 8
"""Ranks of which evidence is kept where no single one is the cause."""


@dataclass
class _Reports:
    """Reports of one rank so far."""

    progress: int | None = None  # at its last report
    phase_since: int | None = None
    retry_at: float | None = None  # when an inconclusive report is repeated
    stall: ReportedStall | None = None
    is_dead: bool = False
    is_death_reported: bool = False
    slow_since: int | None = None  # begin of the last phase that was reported as slow


class Watchdog:
    """Observes the ranks of one runtime directory."""

    def __init__(
        self,
        directory: Path,
        run: Path,
        attempt_directory: Path,
        limits: StallLimits,
        step_offset: int = 0,
        host: str = "",
        *,
        prints_summary: bool = False,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._step_offset = step_offset
        self._paths = run, attempt_directory
        self._host, self._prints_summary = host, prints_summary
        self.end_timeout_s = END_TIMEOUT_S
        self._ranks: dict[int, RankObserver] = {}
        self._reports: dict[int, _Reports] = {}
        self._started = clock.monotonic()
        self._mismatch = ""
        self._is_mismatch_reported = False
        self._last: tuple[str, list[int]] = "", []

    @cached_property
    def _writer(self) -> WatchdogWriter:
        # Its imports take half of the start, and few runs stall.
        from backlight.store.write.watchdog import WatchdogWriter  # noqa: PLC0415

        return WatchdogWriter(*self._paths, self._host)

    @cached_property
    def _peers(self) -> Peers:
        return Peers(self._writer)

    def run(self) -> None:
        """Watch until every rank has ended."""
        while self.poll():
            descriptors = [r.pidfd for r in self._ranks.values() if r.pidfd >= 0 and not r.ended]
            is_close = any(r.overdue_s is not None or r.is_examined_closely for r in self._ranks.values())
            with contextlib.suppress(OSError, ValueError):
                select.select(descriptors, [], [], CLOSE_POLL_S if is_close else POLL_S)
        if self._has_peers():
            self._peers.publish(LEFT, self._observe_host(None))  # no answer can come from here any more
        if "_writer" in vars(self):
            self._writer.close()
        first = self._ranks.get(0)
        if self._prints_summary and first is not None and first.died and first.was_terminated:
            self._print_summary()
        runtime_dir.remove(self._directory)
        runtime_dir.remove_abandoned()

    def pids(self) -> list[int]:
        """Return the processes of the ranks that are known so far."""
        return [one.state.pid for one in self._ranks.values() if one.state is not None]

    def poll(self) -> bool:
        """Observe every rank once; return whether there is more to watch."""
        for rank in runtime_dir.ranks_in(self._directory):
            if rank not in self._ranks:
                self._ranks[rank] = RankObserver(self._directory, rank, self._limits)
                self._reports[rank] = _Reports()
        for one in self._ranks.values():
            one.poll()
        self._report_resolutions()
        self._report_mismatch()
        due = [r for r in self._ranks.values() if self._is_due(r)]
        if due:
            self._report_stall(due)
        elif self._has_peers():
            timeout_s = self._peers.question_timeout_s()
            if timeout_s is not None:
                self._examine_closely()
                self._peers.publish(ANSWERED, self._observe_host(PEER_TIMEOUT_SHARE * timeout_s))
        if not self._ranks:
            return clock.monotonic() - self._started < FIRST_RANK_TIMEOUT_S and self._directory.exists()
        return self._directory.exists() and not self._all_done()

    def _print_summary(self) -> None:
        """Print what the script would have printed at its end; a signal has ended it before that."""
        self.end_timeout_s = SUMMARY_TIMEOUT_S
        # Its imports take longer than all others, and few runs end so.
        from backlight.report.terminal import summary_text  # noqa: PLC0415

        run, here = self._paths[0], Path.cwd()
        with contextlib.suppress(Exception):
            sys.stderr.write(summary_text(run.relative_to(here) if run.is_relative_to(here) else run))
            sys.stderr.flush()

    # Conditions

    def _all_done(self) -> bool:
        return all(r.is_done for r in self._ranks.values())

    def _world_size(self) -> int:
        return max((r.state.world_size for r in self._ranks.values() if r.state is not None), default=1)

    def _has_peers(self) -> bool:
        """Return whether ranks of the run are on other machines."""
        return self._world_size() > len(self._ranks) > 0

    def _is_due(self, one: RankObserver) -> bool:
        reports = self._reports[one.rank]
        failed = one.exit_reason is not None and len(self._ranks) > 1
        if (one.died or failed) and not reports.is_dead:
            # The first to end is the cause; what a launcher ends after it is not.
            return not any(r.is_dead for r in self._reports.values()) and self._has_settled()
        state = one.state
        if state is None or one.overdue_s is None:
            return False
        if reports.progress == state.progress:
            return reports.retry_at is not None and clock.monotonic() >= reports.retry_at
        reports.retry_at = None
        if reports.phase_since == state.phase_since:
            return one.timeout_s is not None and state.silence_s >= one.timeout_s
        return True

    def _has_settled(self) -> bool:
        """Return whether the ranks that a failing rank takes with it have had the time to end."""
        ends = [r.exit_reason.at for r in self._ranks.values() if r.exit_reason is not None]
        ends += [r.ended_at for r in self._ranks.values() if r.died and r.was_terminated]
        return not ends or clock.monotonic() - min(ends) > SETTLE_S or self._all_done()

    def _waits_for_exempt_rank(
        self, observations: Sequence[Observation], diagnoses: dict[int, Diagnosis | None]
    ) -> bool:
        """Return whether a rank evaluates, writes a checkpoint or compiles, for which all others wait."""
        open_ = [o for o in observations if diagnoses[o.rank] is None and not o.ended and not o.stopped]
        return any(
            (o.state.phase in EXEMPT_PHASES and not o.state.inside)
            or ((thread := summarize_stacks(o, self._limits).thread) is not None and is_compiling(thread))
            for o in open_
            if o.state is not None
        )

    # Observation

    def _observe(self) -> list[Observation]:
        return name_reductions([r.observe() for _, r in sorted(self._ranks.items())])

    def _observe_host(self, timeout_s: float | None) -> HostObservation:
        """Diagnose every rank by itself, with the timeout of another machine."""
        observations = self._observe()
        diagnoses = {o.rank: diagnose(o, self._limits, timeout_s) for o in observations}
        return HostObservation(tuple(observations), diagnoses, self._groups(), self._world_size())

    def _groups(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for rank in self._ranks:
            path = runtime_dir.document_path(self._directory, rank, "groups")
            groups |= runtime_dir.read_document(path, lambda d: {int(k): v for k, v in d.items()}) or {}
        return groups

    def _examine_closely(self) -> None:
        """Take stack samples and CPU times of all ranks for a bounded time."""
        request = self._directory / "sample"
        with contextlib.suppress(OSError):
            request.touch()
        deadline = clock.monotonic() + CLOSE_LOOK_S
        while clock.monotonic() < deadline:
            clock.sleep(CLOSE_POLL_S)
            for one in self._ranks.values():
                one.poll(closely=True)
            if all(r.has_samples for r in self._ranks.values()):
                break
        with contextlib.suppress(OSError):
            request.unlink(missing_ok=True)

    def _diagnose(self, due: list[RankObserver]) -> tuple[Diagnosis | None, HostObservation, float | None]:
        """Return the diagnosis over all ranks, the observations behind it, and the timeout that passed."""
        others = any(r not in due and not r.is_done for r in self._ranks.values())
        if others or not all(r.has_samples for r in due):
            self._examine_closely()
        observations = self._observe()
        timeout_s = min((r.timeout_s for r in due if r.timeout_s is not None), default=None)
        common_s = timeout_s if len(observations) > 1 else None
        diagnoses = {o.rank: diagnose(o, self._limits, common_s) for o in observations}
        enters = False
        if timeout_s is not None:
            share_s = PEER_TIMEOUT_SHARE * timeout_s
            # Until then a rank that is entering what it waits for is given the time to be one that waits.
            is_early = max((r.overdue_s or 0.0 for r in due), default=0.0) < share_s
            enters = self._diagnose_peers(observations, diagnoses, share_s) and is_early
        host = HostObservation(tuple(observations), diagnoses, self._groups(), self._world_size())
        ended = any(o.ended or o.exit_reason is not None for o in observations)
        if len(observations) > 1 and not ended and self._waits_for_exempt_rank(observations, diagnoses):
            return None, host, timeout_s
        if enters and not ended:
            return None, host, timeout_s
        return diagnose_ranks(observations, diagnoses, host.groups, host.world_size), host, timeout_s

    def _diagnose_peers(
        self, observations: Sequence[Observation], diagnoses: dict[int, Diagnosis | None], share_s: float
    ) -> bool:
        """Add diagnoses of ranks that need not be silent for as long as the one that is due.

        They are those that wait, and all where one waits for them. Return whether a rank is about to wait:
        it is in a call that others have to enter, and not for ``share_s`` yet.
        """
        open_ = [o for o in observations if diagnoses[o.rank] is None]
        if len(open_) == len(observations):
            return False
        is_awaited = any(d is not None and d.waits for d in diagnoses.values())
        for one in open_:
            found = diagnose(one, self._limits, share_s)
            if found is not None and (is_awaited or found.waits):
                diagnoses[one.rank] = found
        entering = (diagnose(o, self._limits, MIN_PAUSE_S) for o in open_ if diagnoses[o.rank] is None)
        return any(found is not None and found.waits for found in entering)

    # Reports

    def _report_mismatch(self) -> None:
        """Report calls of the ranks that do not fit together, also where nothing hangs."""
        states = {rank: r.state for rank, r in sorted(self._ranks.items()) if r.state is not None}
        if self._is_mismatch_reported or len(states) < 2 or not any(s.distributed for s in states.values()):
            return
        found = find_mismatch([Observation(rank, snapshots=(state,)) for rank, state in states.items()], {})
        before, self._mismatch = self._mismatch, "" if found is None else found.claim
        if found is None or (before != found.claim and not self._all_done()):
            return  # a second reading confirms it, while one is to come
        self._is_mismatch_reported = True
        observations = self._observe()
        found = open_to_unobserved_ranks(found, observations, self._world_size())
        self._emit(found, [o for o in observations if found.rank in {None, o.rank}], observations)

    def _report_resolutions(self) -> None:
        """Report how reported stalls were resolved."""
        for rank, reports in self._reports.items():
            one = self._ranks[rank]
            if one.state is None or reports.stall is None:
                continue
            found = find_resolution(reports.stall, one.state, ended=one.ended, exit_reason=one.exit_reason)
            if found is None:
                continue
            event, words = found
            seconds = clock.monotonic() - reports.stall.began
            reports.stall = reports.progress = reports.retry_at = None
            self._writer.event(one.state.step, event, {"rank": rank, "after": seconds, "how": words})
            if not one.died or one.was_terminated:  # other deaths get a diagnosis of their own
                log(f"rank {rank} {words}, {seconds:.0f} s after that diagnosis")

    def _report_stall(self, due: list[RankObserver]) -> None:
        diagnosis, host, timeout_s = self._diagnose(due)
        if diagnosis is not None and diagnosis.kind is DiagnosisKind.UNKNOWN and not diagnosis.waits:
            unclear = [r for r in self._ranks.values() if r.rank == diagnosis.rank]
            overdue_s = max((r.overdue_s or 0.0 for r in due), default=0.0)
            if overdue_s < SAMPLES_TIMEOUT_S and not all(r.has_samples for r in unclear):
                return  # on an overloaded machine samples take their time
            for one in unclear:
                if self._reports[one.rank].retry_at is None:
                    one.take_native_samples()
            diagnosis, host, timeout_s = self._diagnose(due)
        for one in due:
            if one.died or one.exit_reason is not None:
                self._reports[one.rank].is_dead = True
        if diagnosis is None:
            return
        if HELD in diagnosis.claim and diagnosis.rank in self._ranks:
            # From inside nothing can name the function in C.
            diagnosis = name_native_function(diagnosis, self._ranks[diagnosis.rank].find_native_function())
        cause = self._ranks.get(diagnosis.rank) if diagnosis.rank is not None else None
        if cause is not None and cause.died and cause.was_terminated and self._all_done():
            # The whole job was ended on purpose.
            step = None if cause.state is None else cause.state.step
            self._writer.event(step, ENDED, {"rank": cause.rank, "how": cause.ended})
            return
        is_slow = diagnosis.kind is DiagnosisKind.SLOW
        is_inconclusive = is_slow or diagnosis.kind is DiagnosisKind.UNKNOWN
        is_repeated = any(self._reports[r.rank].retry_at is not None for r in due)
        self._remember(diagnosis, due, is_slow=is_slow, is_inconclusive=is_inconclusive)
        if is_repeated and (is_inconclusive or UNOBSERVED in diagnosis.claim):
            return  # reported before, and nothing new is known here
        if is_slow and cause is not None and cause.state is not None:
            reports, since = self._reports[cause.rank], cause.state.phase_since
            if reports.slow_since == since:
                return  # a pause on an overloaded machine does not make it new
            reports.slow_since = since
        if self._is_mismatch_reported and diagnosis.claim.startswith(self._mismatch):
            return  # reported when the call was made, before anything hung
        if diagnosis.kind is DiagnosisKind.MISMATCH and not self._is_mismatch_reported:
            self._is_mismatch_reported, self._mismatch = True, diagnosis.claim
        if cause is not None and diagnosis.kind is DiagnosisKind.DEAD:
            # How those that waited for it end is no news of its own.
            is_known, self._reports[cause.rank].is_death_reported = (
                self._reports[cause.rank].is_death_reported,
                True,
            )
            if is_known:
                return
        observations = host.observations
        last = diagnosis.claim, [o.state.progress for o in observations if o.state is not None]
        if last == self._last:
            return  # the timeout of another rank has passed, and none has moved since
        self._last = last
        shown = [o for o in observations if o.rank == diagnosis.rank] or observations[:MAX_EVIDENCE]
        self._emit(diagnosis, [] if is_slow else shown, observations)
        if not is_slow and self._has_peers():
            self._peers.publish(DIAGNOSED, host)
            self._peers.ask(timeout_s or 0.0)

    def _remember(
        self, diagnosis: Diagnosis, due: list[RankObserver], *, is_slow: bool, is_inconclusive: bool
    ) -> None:
        now = clock.monotonic()
        for one in self._ranks.values():
            state, reports = one.state, self._reports[one.rank]
            if state is None or one.is_done or (one not in due and one.overdue_s is None):
                continue
            if is_slow or not is_inconclusive:
                # What moves again in this phase is not slow for that; where nothing was known, it is.
                reports.phase_since = state.phase_since
            if is_slow and one.rank == diagnosis.rank:
                continue
            reports.progress = state.progress
            reports.retry_at = now + 2 * max(state.silence_s, 1.0) if is_inconclusive else None
            if not is_slow:  # otherwise it waits for one that moves
                reports.stall = ReportedStall(now, state.progress, state.raised)

    def _emit(
        self, diagnosis: Diagnosis, shown: Sequence[Observation], observations: Sequence[Observation]
    ) -> None:
        evidence = {o.rank: self._ranks[o.rank].format_evidence(o) for o in shown}
        emit(self._writer, diagnosis, observations, evidence, step_offset=self._step_offset)


def main(arguments: list[str]) -> None:
    """Detach from the starting process and watch."""
    directory, run, attempt_directory, step_offset, limits, starter, stream, summary = arguments
    starters = ancestors(int(starter))
    # A process of its own, so that a script that waits for all its children does not wait for this one.
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the other has written its pid, or has ended
        os._exit(0)
    os.close(reading)
    os.setsid()
    # Signals of the terminal or the launcher are for the ranks; the watchdog ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    unblock_signals()
    try:
        runtime_dir.write_document(Path(directory) / runtime_dir.WATCHDOG, {"pid": os.getpid()})
        os.close(writing)
        thresholds = StallLimits().override(json.loads(limits))
        watchdog = Watchdog(
            Path(directory), Path(run), Path(attempt_directory), thresholds, int(step_offset),
            prints_summary=bool(summary),
        )  # fmt: skip
        EndGuard(Path(directory), int(starter), lambda: watchdog.end_timeout_s).start()
        if stream and not stat.S_ISREG(os.fstat(STDERR).st_mode):
            sys.stderr = cast("TextIO", BorrowedStderr(stream, lambda: [*watchdog.pids(), *starters]))
        watchdog.run()
    except Exception as error:  # noqa: BLE001 - the watched process reports it
        with contextlib.suppress(OSError):
            reason = {"pid": os.getpid(), "error": f"{type(error).__name__}: {error}"}
            runtime_dir.write_document(Path(directory) / runtime_dir.WATCHDOG, reason)


if __name__ == "__main__":
    main(sys.argv[1:])
