"""What a tracker is: one file that takes numbers of a run to where a team already looks. No torch.

A tracker is found by its name, and imported when it is requested. It gets points: numbers of
one step under the names of :mod:`backlight.session.trackers.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backlight.records import Finding
from backlight.registry import Registry
from backlight.settings import SettingError
from backlight.text import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PREFIX = "backlight/"
"""What the names of everything that is sent begin with."""


class TrackerError(ValueError):
    """A tracker cannot be used: no credentials, a port in use, a target that it cannot write to."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """The run whose numbers are sent; ``live`` while the run goes on."""

    name: str
    path: Path
    live: bool


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one step for a tracker: its number, Unix time, numbers and histograms by name.

    ``step`` is the user's own number where they gave one, else that of the optimizer step over all attempts.
    NaN in ``values`` was measured as NaN; what was not measured is not there. ``spreads`` hold one number per
    parameter that was measured, for a histogram.
    """

    step: int
    time: float
    values: Mapping[str, float]
    spreads: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)


class Sink(Protocol):
    """An open connection of a tracker; used by one thread, which is not the training thread."""

    def send(self, points: Sequence[Point]) -> None:
        """Take points, in the order of their steps."""

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Take the findings of the run up to ``step``; they replace those of an earlier call."""

    def close(self, *, failed: bool) -> None:
        """Write what is left; ``failed`` says that the run failed."""


@dataclass(frozen=True)
class Tracker:
    """A kind of tracker, by its name on the command line.

    ``open(target, run, active)`` gives a :class:`Sink`; ``target`` is what follows ``NAME=``, empty for the
    default. Where it raises, the tracker is named in one warning and left out. ``active`` returns what the
    user has open of that tracker (a W&B run), None for nothing; it is called once, on the training thread, at
    the first step, and must neither import nor wait.
    """

    name: str
    open: Callable[[str, Tracked, Any], Sink]
    active: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        if not (callable(self.open) and callable(self.active)):
            raise TypeError(f"tracker {self.name!r}: open and active must be callable")


TRACKERS: Registry[Tracker] = Registry(
    "tracker", modules=("session/trackers/*.py",), group="backlight.trackers", holds=Tracker
)


def tracker(
    name: str, *, active: Callable[[], Any] = lambda: None
) -> Callable[[Callable[[str, Tracked, Any], Sink]], Callable[[str, Tracked, Any], Sink]]:
    """Register the decorated function as what opens the tracker ``name``; see :class:`Tracker`."""

    def decorate(opening: Callable[[str, Tracked, Any], Sink]) -> Callable[[str, Tracked, Any], Sink]:
        TRACKERS.add(name, Tracker(name, opening, active))
        return opening

    return decorate


def chosen(option: str) -> tuple[Tracker, str]:
    """Return tracker and target of ``NAME`` or ``NAME=TARGET``; SettingError for an unknown name."""
    name, _, target = option.partition("=")
    if name.strip() not in TRACKERS:
        hint = did_you_mean(name.strip(), TRACKERS)
        raise SettingError("trackers", f"no tracker is called {name.strip()!r}{hint} (NAME or NAME=TARGET)")
    return TRACKERS[name.strip()], target.strip()


def in_markdown(findings: Sequence[Finding]) -> str:
    """Return findings as a list in Markdown, one item each, for trackers that show text."""
    return "\n".join(f"- **{f.severity}** `{f.rule}`: {' '.join(f.title.split())}" for f in findings)
