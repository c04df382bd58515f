"""The account of a step's memory that a run holds, for the panels that show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.source import Source

NAME = "memory.json"

_NONE = "No memory was accounted: backlight memory SCRIPT --out RUN."


@dataclass(frozen=True)
class Accounted:
    """What ``backlight memory --out`` stored.

    Attributes
    ----------
    told:
        What ``memory --json`` prints, and what the rows of the curve are.
    positions, curve:
        Events [P] of the steps, and bytes [kinds, P] there.
    """

    told: Mapping[str, Any]
    positions: NDArray[np.int64]
    curve: NDArray[np.float64]


def account_of(source: Source) -> Accounted | str:
    """Return the newest account of a run, or why there is none."""
    paths = [p for p in source.run.evidence() if p.endswith(f"/{NAME}")]
    if source.attempt is not None:
        paths = [p for p in paths if p.startswith(f"attempt-{source.attempt:03d}/")]
    if not paths:
        return _NONE
    path = sorted(paths)[-1]
    try:
        told = json.loads(source.run.read_evidence(path))
        attempt = int(path.split("/")[0].removeprefix("attempt-"))
        positions, curve = (
            source.run.array(f"memory/{name}", attempt=attempt)[1] for name in ("positions", "curve")
        )
        if not len(positions) or not len(curve):
            return f"The curve of {path} is missing: the account was not written to its end."
        return Accounted(told, np.asarray(positions[-1], np.int64), np.asarray(curve[-1], np.float64))
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}."
