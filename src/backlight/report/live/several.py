"""Several followed runs over each other: a table, and a chart for each number that one of them has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from backlight.report import verdict
from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.encoding import script_json
from backlight.report.live.following import Followed
from backlight.report.live.standing import Stand, Standing
from backlight.report.source import Series, Source
from backlight.report.text import count, duration, number, visible

SHOWN = 8
"""Runs that one chart can tell apart."""

OWN = (("loss", "Loss", ""), ("total_norm", "Total gradient norm", "L2 norm"))
"""Scalars of backlight, with the title of their chart and the label of its axis."""

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
        """Say to each run that somebody looks."""
        for run in self._runs:
            run.touch()

    def head(self) -> dict[str, Any]:
        """Return everything that the page shows beside the data of its panels, as JSON types."""
        version = self.version
        panels = self._panels(version)
        stand = self._stand()
        told: dict[str, Any] = {
            "news": version,
            "stand": {"word": stand.word.value, "detail": stand.detail, "over": stand.over},
        }
        if not panels:
            return told
        findings = sum(len(source.findings) for _, _, source in self._read())
        return told | {
            "run": {"name": self.name, "status": "compared", "rooms": []},
            "verdict": {
                "tone": "info",
                "headline": f"{count(len(self._runs), 'run')} over each other",
                "detail": f"{count(findings, 'finding')} in all; each run has a page of its own above. "
                "A difference between unlike runs is not a difference.",
                "status": "",
                "losses": [],
                "unmeasured": [],
                "figures": [],
            },
            "findings": [],
            "attempts": [],
            "parameters": [],
            "table": "",
            "reasons": {},
            "panels": [
                {key: panel[key] for key in ("name", "title", "note", "kind")} for panel in panels.values()
            ],
        }

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
    rows = [_row(name, run, source) for name, run, source in read]
    remarks = [f"The first {SHOWN} runs are drawn in each chart."] if len(read) > SHOWN else []
    yield _panel(
        "runs",
        "Runs",
        "listing",
        {"name": "Runs", "heads": HEADS, "figures": (2, 3, 4), "rows": rows},
        remarks,
    )
    shown = [(name, source) for name, _, source in read[:SHOWN]]

    def lines(of: Callable[[Source], Series | None]) -> list[Line]:
        found = [(name, of(source)) for name, source in shown]
        return [Line(name, *series) for name, series in found if series is not None and len(series[0])]

    for scalar, title, label in OWN:
        drawn = lines(lambda source, wanted=scalar: _scalar(source, wanted, "backlight"))  # type: ignore[misc]  # bound here, not when called
        if drawn:
            axis = Axis(label, log=spans_decades(*(line.values for line in drawn), factor=30.0))
            yield _panel(scalar, title, "lines", {"charts": [chart(drawn, axis)]})
    drawn = lines(lambda source: source.health)
    if drawn:
        axis = Axis("health (0 to 1)", low=0.0, high=1.0)
        yield _panel("health", "Health", "lines", {"charts": [chart(drawn, axis)]})
    names = sorted({name for _, source in shown for name in source.run.scalar_names("user")})
    charts = []
    for logged in names:
        drawn = lines(lambda source, wanted=logged: _scalar(source, wanted, "user"))  # type: ignore[misc]  # bound here, not when called
        if drawn:
            share = logged.endswith("accuracy")
            axis = Axis("share of samples", low=0.0, high=1.0) if share else Axis("")
            charts.append(chart(drawn, axis, title=visible(logged)))
    if charts:
        yield _panel("logged", "What you logged", "lines", {"charts": charts, "small": len(charts) > 1})
    drawn = lines(_times)
    if drawn:
        yield _panel(
            "times", "Time of a step", "lines", {"charts": [chart(drawn, Axis("time (ms)", low=0.0))]}
        )
    names = sorted({name for _, source in shown for name in source.scalar_names("lr")})
    charts = [
        chart(drawn, Axis("learning rate"), title=visible(name) if len(names) > 1 else "")
        for name in names
        if (drawn := lines(lambda source, wanted=name: _scalar(source, wanted, "backlight")))  # type: ignore[misc]  # bound here, not when called
    ]
    if charts:
        yield _panel("learning_rates", "Learning rate", "lines", {"charts": charts})


def _panel(
    name: str, title: str, kind: str, data: dict[str, Any], remarks: Sequence[str] = ()
) -> dict[str, Any]:
    named = {"name": name, "title": title, "note": "", "kind": kind}
    return {**named, "facts": [], "remarks": list(remarks), "data": data}


def _row(name: str, run: Followed, source: Source) -> list[str]:
    loss, seconds = source.scalar("loss"), source.step_times
    tally = verdict.tally(source.findings)
    return [
        visible(name),
        run.stand.word.value,
        number(source.run.last_step() + 1),
        number(float(loss.values[-1])) if len(loss.values) else "not measured",
        duration(float(np.median(seconds))) if len(seconds) else "not measured",
        tally or "none",
    ]


def _scalar(source: Source, name: str, of: str) -> Series:
    found = source.scalar(name, source=of)
    return found.steps, found.values


def _times(source: Source) -> Series | None:
    found = [source.scalar(name) for name in source.scalar_names("phase")]
    if not found:
        return None
    steps = np.unique(np.concatenate([scalar.steps for scalar in found]))
    return steps, 1e3 * source.step_times


def _apart(names: Sequence[str]) -> list[str]:
    """Return names that differ: a number goes behind those that stand twice."""
    out: list[str] = []
    for name in names:
        wanted, amount = visible(name), 2
        while wanted in out:
            wanted, amount = f"{visible(name)} ({amount})", amount + 1
        out.append(wanted)
    return out
