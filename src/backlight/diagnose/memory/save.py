"""Keep an account of memory as a run directory, which ``report`` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.storage_log import Kind
from backlight.records import RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.write.writer import RunWriter

DOCUMENT = "memory.json"


def open_memory_run(path: Path, script: str, arguments: list[str]) -> RunWriter:
    """Open the run directory of an account, before anything is measured.

    Raises
    ------
    RunWriteError
        If it cannot be written; RunExistsError where it holds something else.
    """
    return RunWriter.create(path, name=path.name, script=script, arguments=arguments, monitors=("steptime",))


def store_memory(writer: RunWriter, account: Account, answer: Mapping[str, Any]) -> None:
    """Write an account and close its run.

    The array ``memory/curve`` [kinds, points] holds bytes over the events of the steps, at the events of
    ``memory/positions`` [points]; ``evidence/memory.json`` is what ``memory --json`` prints, and what the
    rows of the array and its phases are.

    Raises
    ------
    RunWriteError
        If the disk refuses.
    """
    positions, curve = account.curve_by_kind()
    writer.array("memory/positions", 0, positions, dims=("point",), unit="event")
    writer.array("memory/curve", 0, curve, dims=("kind", "point"), unit="byte")
    start, end = account.start, len(account.ledger.events)
    rows = {
        "kinds": [kind.value for kind in Kind],
        "phases": [[at - start, name] for at, name in account.ledger.phases if start <= at < end],
        "events": end - start,
    }
    writer.evidence(DOCUMENT, json.dumps({**answer, "curve": rows}, indent=1))
    for text in answer.get("trouble", ()):
        writer.event(None, "unmeasured", {"what": "memory", "reason": text})
    writer.flush()
    lost = writer.lost
    code = answer.get("exit_code") or 0
    writer.close(RunStatus.FINISHED if code == 0 else RunStatus.FAILED)
    if lost is not None:
        raise RunWriteError(f"the account of memory was not stored: {lost}")
