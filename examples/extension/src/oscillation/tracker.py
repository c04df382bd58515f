"""A tracker: one line of JSON per step, in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.records import Finding
from backlight.session.trackers.base import Point, Tracked, tracker


class Lines:
    """An open file; used by one thread that is not the training's."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def send(self, points: Sequence[Point]) -> None:
        """Write what was measured at each step."""
        for point in points:
            self._file.write(json.dumps({"step": point.step, **point.values}) + "\n")
        self._file.flush()

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Write what the rules say, at the end."""
        for finding in findings:
            self._file.write(
                json.dumps({"step": step, "finding": finding.rule, "title": finding.title}) + "\n"
            )

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._file.close()


@tracker("lines")
def open_lines(target: str, run: Tracked, active: Any) -> Lines:
    """Write to the file ``target``, else to ``export/lines.jsonl`` of the run."""
    path = Path(target) if target else run.path / "export" / "lines.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return Lines(path)
