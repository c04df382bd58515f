"""Keep a profile as a run directory, which ``report`` shows and ``compare`` reads."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backlight.diagnose.profile.document import document
from backlight.diagnose.profile.run import Profile
from backlight.distributed import launch_id, world
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.model.evidence import GARBAGE_COLLECTION, RUNTIME_INFO
from backlight.monitors.steptime.monitor import REMAINDER
from backlight.records import Finding, Made, Phase, RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

PROFILE = "profile.json"
TRACE = "trace.json.gz"


@contextlib.contextmanager
def profile_run(path: Path | None, script: str, arguments: list[str]) -> Iterator[RunWriter | None]:
    """Open the run directory of a profile before anything is measured; without a path, one that is not kept.

    A rank other than the first has none that is not kept: there is nothing to judge it by.

    Raises
    ------
    RunWriteError
        If it cannot be written; RunExistsError where it holds something else.
    """
    with contextlib.ExitStack() as stack:
        if path is None and world().rank != 0:
            yield None
            return
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="backlight-profile-"))
            path = Path(folder) / "run"
        yield _open(path, script, arguments)


def findings(writer: RunWriter) -> list[Finding]:
    """Return what the rules say of the stored profile."""
    return evaluate_rules(open_run(writer.path), made=Made.LIVE)


def _open(path: Path, script: str, arguments: list[str]) -> RunWriter:
    return RunWriter.create(
        path,
        name=path.name,
        script=script,
        arguments=arguments,
        monitors=("steptime",),
        rank=world().rank,
        world_size=world().size,
        run_id=launch_id(),
    )


def store(profile: Profile, writer: RunWriter) -> dict[str, Any]:
    """Write a profile and close its run; return what ``evidence/profile.json`` holds.

    Every clocked step has the scalars ``phase/<phase>``, in seconds, the cold first one included; the rest
    stands in ``evidence/profile.json``, and the trace beside it.

    Raises
    ------
    RunWriteError
        If the disk refuses.
    """
    described = profile.description
    if described is not None:
        writer.fingerprint(described.fingerprint)
        writer.parameter_table(described.records)
        writer.event(None, RUNTIME_INFO, described.circumstances)
    for at, payload in profile.pauses:
        if at < len(profile.observed.steps):
            writer.event(at, GARBAGE_COLLECTION, payload)
    for number, step in enumerate(profile.observed.steps):
        phases = {f"phase/{_name(name, separated=step.separated)}": s for name, s in step.phases.items()}
        writer.scalars(number, phases)
    for text in (*profile.trouble, profile.steps.steady.trouble):
        if text:
            what, _, reason = text.partition(": ")
            writer.event(None, "unmeasured", {"what": what, "reason": reason or text})
    content = document(profile)
    if profile.trace:
        content["trace"] = writer.evidence(TRACE, profile.trace)
    if profile.rank == 0:
        writer.evidence(PROFILE, json.dumps(content, indent=1))
    writer.flush()
    lost = writer.lost
    writer.close(RunStatus.FINISHED if profile.code == 0 else RunStatus.FAILED)
    if lost is not None:
        raise RunWriteError(f"the profile was not stored: {lost}")
    return content


def _name(phase: str, *, separated: bool) -> str:
    return REMAINDER if phase == Phase.OTHER and not separated else phase
