"""Files that findings cite: stack dumps, traces. Their names come from outside and never become a path."""

from __future__ import annotations

import os
from pathlib import Path

from backlight.store.format.names import safe_name

FOLDER = "evidence"


def write_evidence(attempt_folder: Path, name: str, data: bytes) -> Path:
    """Write a file below ``evidence/`` under a name made safe and unique; an OSError passes through."""
    folder = attempt_folder / FOLDER
    folder.mkdir(exist_ok=True)
    safe = safe_name(name, "evidence")
    stem, dot, suffix = safe.rpartition(".")
    number = 0
    while True:
        candidate = safe if number == 0 else f"{stem or suffix}-{number}{dot + suffix if stem else ''}"
        try:
            descriptor = os.open(folder / candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            number += 1
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    return folder / candidate
