"""Diagnosis of dumps of torch's flight recorder, with backlight's run where there is one. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from backlight.records import DiagnosisKind, Finding, Phase
from backlight.store.read.run import open_run
from backlight.watchdog.collective_match import diagnose_collectives
from backlight.watchdog.flight_recorder import CollectiveRecord, Dump, read_dumps
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis


@dataclass(frozen=True)
class RankRecords:
    """What the dump of a rank holds: its collectives, its last one, and the first that has not completed."""

    rank: int
    recorded: int
    last: str
    pending: str
    line: str  # that issued the pending one
    step: int | None = None  # last step in backlight's run


@dataclass(frozen=True)
class AttachedDumps:
    """Result of :func:`attach_dumps`."""

    diagnosis: Diagnosis
    ranks: tuple[RankRecords, ...]
    missing: tuple[int, ...]  # members of the groups without a dump
    findings: tuple[Finding, ...] = ()  # stalls in backlight's run


def attach_dumps(directory: Path, run: Path | None = None) -> AttachedDumps:
    """Diagnose the dumps of a directory; ``run`` adds the steps of the ranks and the diagnoses stored there.

    Raises
    ------
    DumpError
        If the directory holds no dumps, or a file is not one.
    """
    dumps = read_dumps(directory)
    steps: dict[int, int] = {}
    findings: tuple[Finding, ...] = ()
    if run is not None:
        opened = open_run(run)
        steps = {state.rank: state.last_step for state in opened.ranks()}
        findings = tuple(f for f in opened.stored_findings() if f.rule == "stall")
    members = {rank for dump in dumps.values() for record in dump.records for rank in record.ranks}
    missing = tuple(sorted(members - set(dumps)))
    return AttachedDumps(
        _open_to_missing(diagnose_collectives(dumps) or _passed(dumps), missing),
        tuple(_rank_records(dump, steps.get(rank)) for rank, dump in dumps.items()),
        missing,
        findings,
    )


def _passed(dumps: dict[int, Dump]) -> Diagnosis:
    count = sum(len(dump.records) for dump in dumps.values())
    still_open = [(rank, r) for rank, dump in dumps.items() for r in dump.records if not r.completed]
    if still_open:  # of a group that was made again, for instance
        rank, first = still_open[0]
        return Diagnosis(
            DiagnosisKind.UNKNOWN,
            Phase.OTHER,
            f"UNKNOWN: {len(still_open):,} of {count:,} recorded collectives have not completed, and no rank "
            f"is missing in one; the first: rank {rank}, {first.text}",
            refuted_if="they complete by themselves",
            next_check="look for what the hosts do: `backlight attach PID`",
            confidence=LOW,
        )
    return Diagnosis(
        DiagnosisKind.PASS,
        Phase.OTHER,
        f"PASS: all {count:,} recorded collectives of {len(dumps)} ranks have completed, and the calls agree",
        refuted_if="a dump was written before the hang",
        next_check="look for what the hosts do: `backlight attach PID`",
        confidence=MEDIUM,
    )


def _open_to_missing(diagnosis: Diagnosis, missing: tuple[int, ...]) -> Diagnosis:
    """Leave the cause open where it may be a rank without a dump."""
    if not missing or diagnosis.confidence == HIGH:
        return diagnosis
    names = ", ".join(map(str, missing[:16]))
    claim = f"{diagnosis.claim}; rank {names} left no dump, so the cause may be there"
    return replace(diagnosis, claim=claim, rank=None)


def _rank_records(dump: Dump, step: int | None) -> RankRecords:
    pending = next((r for r in dump.records if not r.completed), None)
    last = dump.records[-1].text if dump.records else ""
    return RankRecords(
        dump.rank, len(dump.records), last, _text(pending), pending.line if pending else "", step
    )


def _text(record: CollectiveRecord | None) -> str:
    return record.text if record is not None else ""
