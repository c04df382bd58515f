"""TensorBoard: event files, written by its own library without torch and without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.records import Finding
from backlight.session.trackers.base import PREFIX, Point, Tracked, in_markdown, tracker
from backlight.store.format.names import safe_name


class _TensorBoard:
    """Writes one event file; a further attempt of a run hides what an earlier one wrote beyond its start."""

    def __init__(self, folder: Path) -> None:
        # Slow, and not everybody's.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb  # noqa: PLC0415
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb  # noqa: PLC0415
        from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._session = Event, SessionLog
        self._scalar, self._histogram, self._text = scalar_pb, histogram_pb, text_pb
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), filename_suffix=".backlight")
        self._time = 0.0
        self._begun = False

    def send(self, points: Sequence[Point]) -> None:
        """Add scalars and histograms of each step."""
        for point in points:
            if not self._begun:
                self._begun = True
                start = self._session(status=self._session.START)
                self._writer.add_event(self._event(wall_time=point.time, step=point.step, session_log=start))
            for name, value in point.values.items():
                self._add(self._scalar(PREFIX + name, value), point)
            for name, spread in point.spreads.items():
                self._add(self._histogram(PREFIX + name, spread), point)
            self._time = point.time
        self._writer.flush()

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Add the findings as one text."""
        if findings:
            self._add(self._text(f"{PREFIX}findings", in_markdown(findings)), Point(step, self._time, {}))

    def close(self, *, failed: bool) -> None:
        """Write what is left and close the file."""
        del failed
        self._writer.close()

    def _add(self, summary: Any, point: Point) -> None:
        self._writer.add_event(self._event(wall_time=point.time, step=point.step, summary=summary))


@tracker("tensorboard")
def open_tensorboard(target: str, run: Tracked, active: Any) -> _TensorBoard:
    """Write below the directory ``target``; without one to ``export/tensorboard`` of the run.

    TensorBoard takes a directory for one run, so each run has its own, of its name.
    """
    del active
    if not target:
        return _TensorBoard(run.path / "export" / "tensorboard")
    # The name of a stored run is untrusted input: it must not lead out of the directory.
    return _TensorBoard(Path(target) / safe_name(run.name, safe_name(run.path.name)))
