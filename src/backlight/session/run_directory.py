"""The run directory of this process: opened at the start, evaluated at the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from backlight import codec
from backlight.capture.fingerprint import take_fingerprint
from backlight.distributed import given_directory, launch_id, rank_and_size, start_id, world
from backlight.findings.evaluate import evaluate_rules
from backlight.monitor import Output, RunHandle
from backlight.monitors.health.model.parameters import GroupError, members
from backlight.notebook import notebook_name, notebook_shell
from backlight.notifier import Notifier
from backlight.records import OTHERS, Finding, Made, RunStatus
from backlight.registry import RULES
from backlight.session.settings import Settings
from backlight.store.errors import RunExistsError, RunHeldError
from backlight.store.format.manifest import read_manifest
from backlight.store.format.schema import EVALUATED
from backlight.store.read.attempt_files import open_attempt
from backlight.store.read.run import Run, open_run
from backlight.store.write.attempt import JOIN_TIMEOUT_S, default_path, own_path, wait_for_ranks
from backlight.store.write.writer import RunWriter
from backlight.text import as_typed

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import ParameterTable, Scope
    from backlight.capture.steps import StepTracker
    from backlight.records import Fingerprint

OTHER_RANKS_TIMEOUT_S = 2.0
"""Seconds that rank 0 waits at most, after the run, for ranks that are about to close their files."""


def chosen_path(run: str | os.PathLike[str] | None, script: str) -> tuple[Path, bool]:
    """Return the run directory, and whether another one may be taken where it exists by then."""
    launch = launch_id() if rank_and_size()[1] > 1 else None
    in_notebook = notebook_shell() is not None and launch is None
    if run is not None:
        return Path(run), in_notebook  # a cell that runs again makes another run
    is_free = launch is None and given_directory() is None
    return default_path(notebook_name() if in_notebook else script, launch), is_free


def is_chosen_by_launcher(path: Path) -> bool:
    """Return whether the launcher, not the user, has chosen this run directory."""
    return given_directory() == str(path)


def open_writer(
    path: Path,
    settings: Settings,
    notifier: Notifier,
    *,
    script: str,
    arguments: tuple[str, ...],
    resume: bool = False,
    numbered: bool = False,
) -> RunWriter:
    """Open the run in ``path``, as the rank that this process is.

    With ``resume`` a run that is there goes on; with ``numbered`` the path is a proposal for a new directory.

    A process whose environment makes no sense is watched as a single one, next to ``path`` where that is
    taken; a rank that does not find the run of rank 0 writes a part of it. Both are reported and recorded.
    Where the directory of the launcher is taken, the ranks of this launch take one of their own.

    Raises
    ------
    RunExistsError
        If the directory cannot take this run. RunWriteError and RunFormatError pass through as well.
    """
    rank, size = rank_and_size()
    problem = world().problem if size == 1 else ""
    launch = launch_id()
    creation: dict[str, Any] = {
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
        "run_id": None if problem else launch,
        "launch": None if problem else start_id(),
        "resume": resume,
        "numbered": numbered,
        "otherwise": own_path(path, launch) if launch and is_chosen_by_launcher(path) else None,
        "options": _options(settings, size),
        "join_timeout": join_timeout(),
        "share": settings.share,
        "redact": settings.redact,
        "keep_arguments": settings.keep_arguments,
    }
    try:
        writer = RunWriter.create(path, **creation)
    except RunExistsError as error:
        if not problem and isinstance(error, RunHeldError):
            raise RunExistsError(f"{error}, or continue this run with --resume (resume=True)") from None
        if not problem:
            raise
        writer = RunWriter.create(path.with_name(f"{path.name}.process-{os.getpid()}"), **creation)
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
    run = ended_run(writer, failed=failed)
    findings = evaluate_rules(run, made=Made.LIVE)
    if complete:  # else a reader makes them of the whole
        for finding in findings:
            if not RULES[finding.rule].restates:  # else it is stored already
                writer.finding(finding)
        writer.event(None, EVALUATED, {"findings": len(findings), "lacks": run.shortfall})
    return findings


def ended_run(writer: RunWriter, *, failed: bool) -> Run:
    """Open the run of a writer that is about to be closed, as one that has ended."""
    status = RunStatus.FAILED if failed else RunStatus.FINISHED
    return open_run(writer.path, dataclasses.replace(writer.progress, status=status))


def why_no_step(tracker: StepTracker, scope: Scope, ending: str) -> str:
    """Return why no step was seen, or no parameter; empty if both were.

    ``ending`` is how the script ended before its time, empty where it did not.
    """
    if tracker.done:
        records = scope.table.records
        return "" if records else "no optimizer holds a model: give it to the watch, backlight.watch(model)"
    passes = tracker.backwards
    if ending and passes <= 1:
        frozen = [p for p in scope.table.records if p.in_model]
        is_frozen = bool(frozen) and not any(p.requires_grad for p in frozen)
        why = f": none of the {len(frozen)} parameters of the model requires a gradient" if is_frozen else ""
        return f"{ending} {'in' if passes else 'before'} its first backward pass{why}"
    if not passes:
        return "neither a backward pass nor an optimizer step was seen"
    if tracker.failed_backwards >= passes and not ending:  # as by sys.exit() in a handler of a signal
        which = "the only backward pass" if passes == 1 else f"all {passes} backward passes"
        return f"an exception ended {which}, and no optimizer step was seen"
    seen = "1 backward pass was seen" if passes == 1 else f"{passes} backward passes were seen"
    missing = (
        f"{seen}, but no step of a torch.optim optimizer that holds the model, and no change of a weight"
    )
    if ending:
        return f"{missing}: {ending}"
    return f"{missing}: where an engine makes the updates, call watch.mark_step() after each"


def holds_nothing(writer: RunWriter) -> bool:
    """Return whether no process of this attempt has stored a step, a scalar or a finding; False above rank 0.

    Other ranks may still be about to, or hang because this one has ended.
    """
    writer.flush()
    if writer.lost is not None or writer.rank or not wait_for_ranks(writer.path, OTHER_RANKS_TIMEOUT_S):
        return False
    manifest = read_manifest(writer.path)
    entries = [entry for entry in manifest.attempts if entry.index == writer.attempt]
    attempts = [open_attempt(writer.path, entry, manifest.run_id) for entry in entries]
    files = [file for attempt in attempts for file in (*attempt.files, *attempt.watchdogs)]
    return not any(file.last_step >= 0 or file.findings() for file in files)


def _options(settings: Settings, size: int) -> dict[str, Any]:
    """Return what all ranks are expected to have in common."""
    return {
        "world_size": size,
        "monitors": list(settings.monitors),
        "every": "by budget" if settings.every is None else settings.every,
        **codec.plain(settings.of_monitors),
    }


class FingerprintOutput(Output):
    """Takes the fingerprint once the first step is over; part of every watch."""

    name = "fingerprint"
    records = "the fingerprint"

    def __init__(self, groups: dict[str, str]) -> None:
        self._groups = groups

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor, whatever is requested."""
        return cls(settings.groups)

    def check_models(self, models: Sequence[nn.Module], table: ParameterTable) -> None:
        """Refuse groups that match no parameter of the given models."""
        for pattern in self._groups.values():
            members([record.name for record in table.records], pattern)

    def attach(self, run: RunHandle) -> None:
        """Remember where the fingerprint goes."""
        self._run = run

    def on_parameters_known(self) -> None:
        """Take the fingerprint, and look for groups without parameters."""
        table = self._run.scope.table
        fingerprint = take_fingerprint(self._run.scope, self._run.arguments)
        expected = self._run.writer.expected_fingerprint
        if expected is not None and _is_another_model(fingerprint, expected):
            sizes = expected.parameter_count, fingerprint.parameter_count
            what = f"{sizes[0]} parameters, this script has {sizes[1]}"
            if sizes[0] == sizes[1]:
                what = "of other modules or shapes than this script's"
            path = as_typed(self._run.path)
            self._run.abandon(f"{path}: holds another training run ({what}); choose another --out")
            return
        self._run.writer.fingerprint(fingerprint)
        names = [record.name for record in table.records]
        for group, pattern in self._groups.items():
            try:
                members(names, pattern)
            except GroupError as error:
                self._run.notifier.unmeasured(f"group {group}", str(error))
                self._run.notifier.warn(f"group {group}", f"the group {group!r} is not measured: {error}")


def _is_another_model(fingerprint: Fingerprint, expected: Fingerprint) -> bool:
    """Return whether module tree or shapes differ; with another number of ranks they may without meaning."""
    return fingerprint.world_size == expected.world_size and fingerprint.module_hash != expected.module_hash
