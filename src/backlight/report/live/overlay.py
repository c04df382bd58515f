"""Several followed runs overlaid: a table, and a chart for each number that one of them has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from backlight.answer import Table, indexed
from backlight.findings.losses import losses_of
from backlight.report import verdict
from backlight.report.live.follower import FollowedRun, Stand, Standing
from backlight.report.overlay import compared, curve_panels, left_out, listing
from backlight.report.page_codec import script_json
from backlight.report.panel import error_text
from backlight.report.source import Source
from backlight.text import count, duration, number, visible

HEADS = ("run", "now", "steps", "last loss", "median step", "findings")


class Several:
    """A page over ``runs``; what each of them shows alone is a page of its own."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self._runs = tuple(runs)
        self.name = f"{len(self._runs)} runs"
        self._names = _distinct_names([run.name for run in self._runs])
        self._drawn: tuple[int, dict[str, dict[str, Any]]] | None = None

    @property
    def version(self) -> int:
        """Return a number that grows with every news of any run."""
        return sum(run.version for run in self._runs)

    def touch(self) -> None:
        """Record for each run that a page is open."""
        for run in self._runs:
            run.touch()

    def head(self) -> dict[str, Any]:
        """Return everything that the page shows next to the data of its panels, as JSON types."""
        version = self.version
        panels = self._panels(version)
        state: dict[str, Any] = {"news": version, "stand": self._stand().as_json()}
        if not panels:
            return state
        findings = sum(len(source.findings) for _, _, source in self._read())
        detail = f"{count(findings, 'finding')} in all; each run has a page of its own above."
        announced = ("name", "title", "note", "place", "kind", "stated")
        shown = [{key: panel[key] for key in announced if key in panel} for panel in panels.values()]
        last = max(source.step_range[1] for _, _, source in self._read())
        several = compared(self.name, len(self._runs), detail, steps=(0, last))
        return state | several | {"table": "", "panels": shown}

    def panel(
        self, name: str, *, have: str = "", column: str = "", between: tuple[int, int] | None = None
    ) -> tuple[str, str] | None:
        """Return a stamp of a panel and its content as JSON, or None where ``have`` is that stamp.

        Raises
        ------
        KeyError
            If there is no such panel.
        """
        text = script_json(self._panels(self.version)[name])
        stamp = hashlib.sha256(text.encode("ascii")).hexdigest()[:20]
        return None if stamp == have else (stamp, text)

    def _read(self) -> Iterator[tuple[str, FollowedRun, Source]]:
        for name, run in zip(self._names, self._runs, strict=True):
            source = run.source
            if source is not None:
                yield name, run, source

    def _stand(self) -> Stand:
        words = [run.stand.word for run in self._runs]
        for word in Standing:
            if word in words and word is not Standing.FINISHED:
                amount = words.count(word)
                return Stand(word, f"{amount} of {count(len(words), 'run')}: {word.value}.")
        return Stand(Standing.FINISHED, "All of these runs ended.")

    def _panels(self, version: int) -> dict[str, dict[str, Any]]:
        if self._drawn is None or self._drawn[0] != version:
            read = [(name, run, source) for name, run, source in self._read()]
            self._drawn = (version, {panel["name"]: panel for panel in _drawn(read)} if read else {})
        return self._drawn[1]


def _drawn(read: Sequence[tuple[str, FollowedRun, Source]]) -> Iterator[dict[str, Any]]:
    """Yield the table of the runs and their charts; what fails is named in its place, and the rest stays."""
    rows = [_row(name, run, source) for name, run, source in read]
    table = Table(indexed(HEADS, numbers=(2, 3, 4)), rows, title="Runs")
    yield listing(table, remarks=left_out(len(read)))
    yield from curve_panels([(name, source) for name, _, source in read])


def _row(name: str, run: FollowedRun, source: Source) -> list[str]:
    try:
        losses, seconds = losses_of(source.run), source.step_times
        lasts = [(label, number(float(loss.values[-1]))) for label, loss in losses.items()]
        named = [value if label == "loss" else f"{value} ({visible(label)})" for label, value in lasts]
        return [
            name,
            run.stand.word.value,
            number(source.run.last_step() + 1),
            ", ".join(named) or "not measured",
            duration(float(np.median(seconds))) if len(seconds) else "not measured",
            verdict.tally(source.findings) or "none",
        ]
    except Exception as error:  # noqa: BLE001 - one run must not take the others with it
        return [name, run.stand.word.value, "", "", "", f"could not be read: {error_text(error).rstrip('.')}"]


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Return names that differ: a number goes behind those that stand twice."""
    out: list[str] = []
    for name in names:
        wanted, amount = visible(name), 2
        while wanted in out:
            wanted, amount = f"{visible(name)} ({amount})", amount + 1
        out.append(wanted)
    return out
