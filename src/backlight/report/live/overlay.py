"""Several followed runs overlaid: a table, and a chart for each number that one of them has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from backlight.report import verdict
from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.encoding import script_json
from backlight.report.live.follower import Followed
from backlight.report.live.run_state import Stand, Standing
from backlight.report.overlay import SHOWN, compared, left_out, listing, part
from backlight.report.panel import error_text, not_drawn
from backlight.report.source import Series, Source
from backlight.text import count, duration, number, visible

HEADS = ("run", "now", "steps", "last loss", "median step", "findings")


class Several:
    """A page over ``runs``; what each of them shows alone is a page of its own."""

    def __init__(self, runs: Sequence[Followed]) -> None:
        self._runs = tuple(runs)
        self.name = f"{len(self._runs)} runs"
        self._names = _apart([run.name for run in self._runs])
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
        shown = [{key: panel[key] for key in ("name", "title", "note", "kind")} for panel in panels.values()]
        return state | compared(self.name, len(self._runs), detail) | {"table": "", "panels": shown}

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

    def _read(self) -> Iterator[tuple[str, Followed, Source]]:
        for name, run in zip(self._names, self._runs, strict=True):
            source = run.source
            if source is not None:
                yield name, run, source

    def _stand(self) -> Stand:
        words = [run.stand.word for run in self._runs]
        for word in (Standing.READING, Standing.LIVE, Standing.WAITING, Standing.STALE, Standing.UNREADABLE):
            if word in words:
                amount = words.count(word)
                return Stand(word, f"{amount} of {count(len(words), 'run')}: {word.value}.")
        return Stand(Standing.ENDED, "All of these runs ended.")

    def _panels(self, version: int) -> dict[str, dict[str, Any]]:
        if self._drawn is None or self._drawn[0] != version:
            read = [(name, run, source) for name, run, source in self._read()]
            self._drawn = (version, {panel["name"]: panel for panel in _drawn(read)} if read else {})
        return self._drawn[1]


def _drawn(read: Sequence[tuple[str, Followed, Source]]) -> Iterator[dict[str, Any]]:
    """Yield the table of the runs and their charts; what fails is named in its place, and the rest stays."""
    rows = [_row(name, run, source) for name, run, source in read]
    yield listing(HEADS, rows, figures=(2, 3, 4), remarks=left_out(len(read)))
    for name, (title, curves, axis) in CHARTS.items():
        lines: dict[str, list[Line]] = {}
        failed = []
        for run, _, source in read[:SHOWN]:
            try:
                for curve, (steps, values) in curves(source).items():
                    if len(steps):
                        lines.setdefault(curve, []).append(Line(run, steps, values))
            except Exception as error:  # noqa: BLE001 - one run must not take the others with it
                failed.append(f"{run}: {error_text(error).rstrip('.')}")
        charts = []
        for curve, of_runs in sorted(lines.items()):
            try:
                charts.append(chart(of_runs, axis(curve, of_runs), title=visible(curve)))
            except Exception as error:  # noqa: BLE001 - one chart must not take the others with it
                failed.append(error_text(error).rstrip("."))
        said = "; ".join(failed)
        if charts:
            data = {"charts": charts, "small": name == "logged" and len(charts) > 1}
            yield part(name, title, "lines", data, [f"Not drawn: {said}."] if said else [])
        elif said:
            yield part(name, title, "failed", {"reason": not_drawn(name, said)})


Curves = Callable[[Source], dict[str, Series]]
"""What is drawn of one run, by the title of its chart."""


def _own(name: str) -> Curves:
    return lambda source: {"": _scalar(source, name)}


def _health(source: Source) -> dict[str, Series]:
    return {} if source.health is None else {"": source.health}


def _logged(source: Source) -> dict[str, Series]:
    return {name: _scalar(source, name, "user") for name in source.run.scalar_names("user")}


def _times(source: Source) -> dict[str, Series]:
    found = [source.scalar(name) for name in source.scalar_names("phase")]
    if not found:
        return {}
    steps = np.unique(np.concatenate([scalar.steps for scalar in found]))
    return {"": (steps, 1e3 * source.step_times)}


def _rates(source: Source) -> dict[str, Series]:
    names = source.scalar_names("lr")
    return {name if len(names) > 1 else "": _scalar(source, name) for name in names}


def _scaled(label: str) -> Callable[[str, Sequence[Line]], Axis]:
    return lambda _, lines: Axis(label, log=spans_decades(*(line.values for line in lines), factor=30.0))


def _fixed(label: str, high: float | None = None, low: float | None = 0.0) -> Callable[[str, Any], Axis]:
    return lambda _title, _lines: Axis(label, low=low, high=high)


def _of_logged(title: str, _: Sequence[Line]) -> Axis:
    return Axis("share of samples", low=0.0, high=1.0) if title.endswith("accuracy") else Axis("")


CHARTS: dict[str, tuple[str, Curves, Callable[[str, Sequence[Line]], Axis]]] = {
    "loss": ("Loss", _own("loss"), _scaled("")),
    "total_norm": ("Total gradient norm", _own("total_norm"), _scaled("L2 norm")),
    "health": ("Health", _health, _fixed("health (0 to 1)", 1.0)),
    "logged": ("What you logged", _logged, _of_logged),
    "times": ("Time of a step", _times, _fixed("time (ms)")),
    "learning_rates": ("Learning rate", _rates, _fixed("learning rate", low=None)),
}
"""Panels by name: their titles, their curves, and the axis of a chart."""


def _row(name: str, run: Followed, source: Source) -> list[str]:
    try:
        loss, seconds = source.scalar("loss"), source.step_times
        return [
            name,
            run.stand.word.value,
            number(source.run.last_step() + 1),
            number(float(loss.values[-1])) if len(loss.values) else "not measured",
            duration(float(np.median(seconds))) if len(seconds) else "not measured",
            verdict.tally(source.findings) or "none",
        ]
    except Exception as error:  # noqa: BLE001 - one run must not take the others with it
        return [name, run.stand.word.value, "", "", "", f"could not be read: {error_text(error).rstrip('.')}"]


def _scalar(source: Source, name: str, of: str = "backlight") -> Series:
    found = source.scalar(name, source=of)
    return found.steps, found.values


def _apart(names: Sequence[str]) -> list[str]:
    """Return names that differ: a number goes behind those that stand twice."""
    out: list[str] = []
    for name in names:
        wanted, amount = visible(name), 2
        while wanted in out:
            wanted, amount = f"{visible(name)} ({amount})", amount + 1
        out.append(wanted)
    return out
