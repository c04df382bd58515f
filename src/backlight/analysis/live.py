"""Live pages of runs: each run is followed while it trains, evaluated, and served."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from backlight.analysis.report import source_of
from backlight.findings.evaluate import findings_of
from backlight.records import Finding
from backlight.report.live.follower import FollowedRun, Several
from backlight.report.source import Source
from backlight.store.format.names import MANIFEST
from backlight.store.read.run import Run, open_growing, open_run

CELLS = 200_000
"""Cells of a heat map on a live page: as fine as a screen, and few enough to be sent repeatedly."""


def followed(paths: Sequence[Path]) -> list[FollowedRun]:
    """Return each run to be followed; nothing is read yet."""
    for path in paths:
        # An empty directory may become a run.
        if not path.is_dir() or ((path / MANIFEST).is_file() or any(path.iterdir())):
            open_run(path)  # raises with the reason
    return [FollowedRun(path, findings_of, _source, open_growing()) for path in paths]


def _source(run: Run, findings: Sequence[Finding]) -> Source:
    return dataclasses.replace(source_of(run, findings), cells=CELLS)


@contextlib.contextmanager
def open_browser(address: str) -> Iterator[None]:
    """Open ``address`` in the browser, which reads it from a file that is removed at the end.

    Every user of the machine can read the command line of the browser, and no other one the file.
    """
    with tempfile.TemporaryDirectory(prefix="backlight-open-") as folder:  # for this user alone
        page = Path(folder) / "page.html"
        page.touch(0o600)
        page.write_text(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={html.escape(address)}"><title>backlight</title>'
        )
        webbrowser.open(page.as_uri())
        yield


class Live:
    """Pages of ``runs``, followed and served until :meth:`close`."""

    def __init__(self, runs: Sequence[FollowedRun], port: int = 0) -> None:
        # Deferred: `backlight top` needs no server, nor the packages of one.
        from backlight.report.live.server import LiveServer  # noqa: PLC0415

        subjects: dict[str, FollowedRun | Several] = {f"run-{index}": run for index, run in enumerate(runs)}
        if len(runs) > 1:
            subjects = {"over": Several(runs), **subjects}
        self._runs = tuple(runs)
        self.server = LiveServer(subjects, port)

    def new_address(self) -> str:
        """Return an address with a token that lets a browser in, once."""
        return self.server.new_address()

    def run(self) -> None:
        """Follow and serve until interrupted."""
        for run in self._runs:
            run.start()
        try:
            self.server.run()
        finally:
            self.close()

    def close(self) -> None:
        """Stop following and serving."""
        self.server.stop()
        for run in self._runs:
            run.close()
