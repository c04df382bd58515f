"""What a panel is: a function that turns series of a stored run into data to draw.

A panel names the paths of the run that it shows, so that the evidence of a finding leads to it. It
returns either what to draw, or why there is nothing: a panel never draws an empty chart.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backlight.answer import Table
from backlight.registry import Registry
from backlight.terminal import write
from backlight.text import visible

if TYPE_CHECKING:
    from backlight.report.source import Source


@dataclass(frozen=True, slots=True)
class PanelFact:
    """One number next to a chart, already written out for people."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a panel shows: ``kind`` names the drawer in ``assets/kinds``, ``data`` is what it takes.

    ``data`` holds JSON types and numpy arrays. ``remarks`` are sentences about what is missing or
    reduced in the drawing.
    """

    kind: str
    data: Mapping[str, Any]
    facts: tuple[PanelFact, ...] = ()
    remarks: tuple[str, ...] = ()


MAX_ROWS = 60
"""Rows of a table that a panel shows."""


def table_data(table: Table, *, most: int = MAX_ROWS, is_titled: bool = True) -> dict[str, Any]:
    """Return a table as the drawers ``figures`` and ``listing`` of the page take it."""
    titles = [column.title for column in table.columns]
    heads = [title if title.startswith("ms") else title[:1].upper() + title[1:] for title in titles]
    return {
        "title": (table.title or heads[0]) if is_titled else "",
        "heads": heads,
        "figures": [at for at, column in enumerate(table.columns) if column.kind == "number"],
        "rows": list(table.cells(most)),
    }


def tabular(*tables: Table, facts: Sequence[PanelFact] = (), remarks: Sequence[str] = ()) -> Drawn:
    """Draw tables, with titles where there are several; their notes become remarks."""
    data = [table_data(table, is_titled=len(tables) > 1) for table in tables]
    notes = (f"{note[:1].upper()}{note[1:]}." for table in tables for note in table.notes)
    return Drawn("figures", {"tables": data}, tuple(facts), (*remarks, *notes))


STATED = "stated"
"""Kind of what is one line of text on the page: a chart of one value shows nothing."""


def stated(text: str) -> Drawn:
    """Return a panel whose values never changed: one line of text, in a list with others of its kind."""
    return Drawn(STATED, {"text": text})


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Why a panel has nothing to show; the reason is a full sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed(NotMeasured):
    """A panel that raised: the drawer ``failed`` says so in its place.

    Also where its monitor did not watch.
    """


Figures = Sequence[tuple[str, str, str]]
"""The few numbers under the verdict: label, value and note."""


@dataclass(frozen=True, slots=True)
class FactLine:
    """One line of facts under the verdict, and the command that looks further where one does."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class MonitorSummary:
    """What was measured in a run, as one sentence, and the numbers that matter most.

    ``headline`` is the result of a command that looks for one thing, shown where there are no findings.
    """

    detail: str
    figures: Callable[[Source], Figures]
    measured: bool = True
    headline: str = ""


class PanelWarning(UserWarning):
    """A panel that could not be drawn: its place says why, and the others are drawn."""


@contextlib.contextmanager
def report_panel_warnings() -> Iterator[list[str]]:
    """Print each warning about a panel once, as a plain line, and yield the list of them."""
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", PanelWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, PanelWarning):
                others(message, category, *where, **more)
            elif str(message) not in printed:
                printed.append(str(message))
                write(message, file=sys.stderr)

        warnings.showwarning = show
        yield printed


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the page.

    ``series`` are paths inside a run, as evidence names them: ``series/gradient``, ``scalars/clip``.
    A path belongs to the panel with the longest matching beginning, in whole segments. ``monitor`` is the
    monitor whose measurements it shows, empty for what every run has. Without data, a panel of a monitor that
    did not watch is left out, since one line says so for all of them; and so is an ``optional`` one, about
    what many runs do not have: several ranks, a loss scale. ``events`` are the kinds that it lists, which the
    panel of all events leaves out. With ``layers`` a path below its series names a layer. ``place`` is
    ``"full"``, ``"half"`` for a panel that shares its row with another where there is room, or ``"details"``
    for one in the folded part at the end. ``summary`` returns the summary of a run in which this monitor
    measured what matters most; the first one that does, in the order of the page, is the run's. ``line``
    returns one line of facts that stands under the verdict, None where there is none. ``checked`` returns
    what the rules of its monitor looked at, for the end of a run without findings.
    """

    name: str
    title: str
    order: int
    series: tuple[str, ...]
    render: Callable[[Source], Drawn | NotMeasured]
    note: str = ""
    monitor: str = ""
    optional: bool = False
    events: tuple[str, ...] = ()
    layers: bool = False
    place: str = "full"
    summary: Callable[[Source], MonitorSummary | None] | None = None
    line: Callable[[Source], FactLine | None] | None = None
    checked: Callable[[Source], str] | None = None

    def __post_init__(self) -> None:
        if not callable(self.render):
            raise TypeError(f"panel {self.name!r}: render must be callable, got {self.render!r}")


PANELS: Registry[Panel] = Registry(
    "panel",
    modules=("report/run_panels.py", "monitors/*/panels.py", "monitors/*/panels/*.py"),
    group="backlight.panels",
    holds=Panel,
)


def panel(
    name: str, *, title: str, order: int, series: Sequence[str], **more: Any
) -> Callable[[Callable[[Source], Drawn | NotMeasured]], Callable[[Source], Drawn | NotMeasured]]:
    """Register the decorated function as a panel; see :class:`Panel`."""

    def decorate(render: Callable[[Source], Drawn | NotMeasured]) -> Callable[[Source], Drawn | NotMeasured]:
        PANELS.add(name, Panel(name, title, order, tuple(series), render, **more))
        return render

    return decorate


def in_order(monitors: Collection[str] = ()) -> list[Panel]:
    """Return the panels in the order of the page: at least those of some monitors, by default all."""
    return sorted((entry for _, entry in PANELS.of(monitors)), key=lambda entry: (entry.order, entry.name))


def shown(panel: Panel, source: Source) -> Drawn | NotMeasured:
    """Render a panel; one that raises says so in its place, and the others stay."""
    try:
        result: object = panel.render(source)  # of a plug-in, which may be anything
    except Exception as error:  # noqa: BLE001 - one panel must not take the others with it
        return failed(panel, error)
    if not isinstance(result, Drawn | NotMeasured):
        return failed(panel, TypeError(f"it returned {type(result).__name__}, not Drawn or NotMeasured"))
    return result


def failed(panel: Panel, error: Exception) -> Failed:
    """Return what stands in the place of a panel that raised ``error``."""
    plug_in = PANELS.origin(panel.name)
    why = error_text(error)
    if plug_in is not None:
        of = f"{plug_in.distribution} {plug_in.version}"
        why = f"the plug-in {plug_in.name!r} of {of} failed: {why}"
    return Failed(not_drawn(panel.name, why))


def error_text(error: Exception) -> str:
    """Return type and message of an exception on one line."""
    return visible(f"{type(error).__name__}: {error}")


def not_drawn(name: str, why: str) -> str:
    """Return the sentence that stands in the place of a panel; ``why`` may hold anything."""
    return visible(f"Panel {name!r} could not be drawn: {why.rstrip('.')}.")
