"""The run directory of this process: opened at the start, evaluated at the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backlight.distributed import launch_id, rank_and_size, world
from backlight.findings.evaluate import evaluate_rules
from backlight.notifier import Notifier
from backlight.records import OTHERS, Finding, Made
from backlight.registry import RULES
from backlight.session.settings import Settings
from backlight.store.errors import RunExistsError
from backlight.store.format.hdf5_pieces import Filters
from backlight.store.format.schema import EVALUATED
from backlight.store.read.attempt_files import wait_for_ranks
from backlight.store.read.run import open_run
from backlight.store.write.attempt import JOIN_TIMEOUT_S
from backlight.store.write.writer import RunWriter

OTHER_RANKS_TIMEOUT_S = 2.0
"""Seconds that rank 0 waits at most, after the run, for ranks that are about to close their files."""


def open_writer(
    path: Path, settings: Settings, notifier: Notifier, *, script: str, arguments: tuple[str, ...]
) -> RunWriter:
    """Open the run in ``path``, as the rank that this process is.

    A process whose environment makes no sense is watched as a single one, next to ``path`` where that is
    taken; a rank that does not find the run of rank 0 writes a part of it. Both are reported and recorded.

    Raises
    ------
    RunExistsError
        If the directory cannot take this run. RunWriteError and RunFormatError pass through as well.
    """
    rank, size = rank_and_size()
    problem = world().problem if size == 1 else ""
    given: dict[str, Any] = {
        "name": path.name,
        "script": script,
        "arguments": arguments,
        "max_disk": settings.max_disk,
        "overrides": settings.overrides(),
        "groups": settings.groups,
        "monitors": settings.monitors,
        "flush_interval": settings.flush_interval,
        "on_lost": notifier.lost,
        "step_offset": settings.step_offset,
        "rank": rank,
        "world_size": size,
        "run_id": None if problem else launch_id(),
        "filters": Filters(settings.measures.compression, settings.measures.level),
        "options": _options(settings, size),
        "join_timeout": join_timeout(),
    }
    try:
        writer = RunWriter.create(path, **given)
    except RunExistsError:
        if not problem:
            raise
        writer = RunWriter.create(path.with_name(f"{path.name}.process-{os.getpid()}"), **given)
    notifier.writer = writer
    if problem:
        where = f" in {writer.path}" if writer.path != path else ""
        notifier.warn("ranks", f"{problem}; this process is watched alone{where}")
        notifier.unmeasured(OTHERS, problem)
    if writer.part_reason:
        notifier.warn(
            "ranks",
            f"rank {rank} does not see the run of rank 0 and writes a part of it in {writer.path}: join the "
            f"directories with `backlight join` ({writer.part_reason})",
        )
        notifier.unmeasured(OTHERS, writer.part_reason)
    return writer


def join_timeout() -> float:
    """Return the seconds that a rank waits for rank 0: ``BACKLIGHT_JOIN_TIMEOUT`` where that is a number."""
    try:
        seconds = float(os.environ.get("BACKLIGHT_JOIN_TIMEOUT", JOIN_TIMEOUT_S))
    except ValueError:
        return JOIN_TIMEOUT_S
    return seconds if 0.0 <= seconds < float("inf") else JOIN_TIMEOUT_S


def final_findings(writer: RunWriter, *, failed: bool) -> list[Finding]:
    """Evaluate the rules on a run whose training is over, and store the findings; on other ranks than 0 none.

    A stored finding stays, so that it must not be made of what the first rank to finish happens to see of the
    others: their last second of rows may not have been written yet. After a failure there is no waiting: the
    others may be waiting for this rank.
    """
    if writer.lost is not None or writer.rank != 0:
        return []
    complete = wait_for_ranks(writer.path, 0.0 if failed else OTHER_RANKS_TIMEOUT_S)
    findings = evaluate_rules(open_run(writer.path), made=Made.LIVE)
    if complete:  # else a reader makes them of the whole
        for finding in findings:
            if not RULES[finding.rule].restates:  # else it is stored already
                writer.finding(finding)
        writer.event(None, EVALUATED, {"findings": len(findings)})
    return findings


def _options(settings: Settings, size: int) -> dict[str, Any]:
    """Return what all ranks are expected to have in common."""
    return {
        "world_size": size,
        "monitors": list(settings.monitors),
        "every": "by budget" if settings.every is None else settings.every,
        "histogram": settings.histogram,
        "exact_updates": "sampled" if settings.exact_updates is None else settings.exact_updates,
        "per_backward": settings.per_backward,
    }
