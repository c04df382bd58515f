"""Keep an account of memory as a run folder, which ``report`` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backlight.records import RunStatus
from backlight.steptime.memory.account import Account
from backlight.steptime.memory.ledger import Kind
from backlight.store.errors import RunWriteError
from backlight.store.writer import RunWriter

DOCUMENT = "memory.json"
EVENT = "memory"
"""Kind of the event that names what the arrays hold."""


def open_memory_run(path: Path, script: str, arguments: list[str]) -> RunWriter:
    """Open the run folder of an account, before anything is measured.

    Raises
    ------
    RunWriteError
        If it cannot be written; RunExistsError where it holds something else.
    """
    return RunWriter.create(path, name=path.name, script=script, arguments=arguments, rooms=("steptime",))


def store_memory(writer: RunWriter, account: Account, answer: Mapping[str, Any]) -> None:
    """Write an account and close its run.

    The array ``memory/curve`` [kinds, points] holds bytes over the events of the steps, at the events of
    ``memory/positions`` [points]; ``memory/modules`` [modules, kinds] the bytes at the peak. An event
    ``memory`` names their rows, and ``evidence/memory.json`` is what ``memory --json`` prints.

    Raises
    ------
    RunWriteError
        If the disk refuses.
    """
    positions, curve = account.curve_by_kind()
    modules = account.modules()
    rows = [[module.own.get(kind, 0) for kind in Kind] for module in modules]
    writer.array("memory/positions", 0, positions, dims=("point",), unit="event")
    writer.array("memory/curve", 0, curve, dims=("kind", "point"), unit="byte")
    writer.array("memory/modules", 0, rows, dims=("module", "kind"), unit="byte")
    path = writer.evidence(DOCUMENT, json.dumps(answer, indent=1))
    start, end = account.start, len(account.ledger.events)
    writer.event(
        0,
        EVENT,
        {
            "how": answer["how"],
            "document": path,
            "kinds": [kind.value for kind in Kind],
            "modules": [module.name for module in modules],
            "phases": [[at - start, name] for at, name in account.ledger.phases if start <= at < end],
            "peak": account.peak,
            "position": account.position - start,
            "phase": account.phase,
            "events": end - start,
        },
    )
    for text in answer.get("trouble", ()):
        writer.event(None, "unmeasured", {"what": "memory", "reason": text})
    writer.flush()
    lost = writer.lost
    code = answer.get("exit_code") or 0
    writer.close(RunStatus.FINISHED if code == 0 else RunStatus.FAILED)
    if lost is not None:
        raise RunWriteError(f"the account of memory was not stored: {lost}")
