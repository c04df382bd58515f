"""One capture plan from what the monitors ask for: which probes run, each once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backlight.registry import PROBES, Needs, Probe, warn

DEFAULT_MONITORS = ("health", "stalls", "steptime")


@dataclass(frozen=True)
class Active:
    """A probe in use: its declaration, its measuring object, and at which recorded steps it measures."""

    probe: Probe
    measuring: Any
    spacing: int


@dataclass(frozen=True)
class Plan:
    """The probes of a session by what they need."""

    monitors: tuple[str, ...]
    gradients: tuple[Active, ...]
    detailed: tuple[Active, ...]
    weights: tuple[Active, ...]
    steps: tuple[Active, ...]


def _said(name: str, error: Exception) -> None:
    warn(f"backlight: the probe {name!r} is left out: {type(error).__name__}: {error}")


class Foreign:
    """The probe of a plug-in: gives scalars below its own name, and nothing more once it has raised."""

    def __init__(
        self, probe: Probe, options: Mapping[str, Any], left_out: Callable[[str, Exception], None]
    ) -> None:
        self._name, self._left_out = probe.name, left_out
        self._measuring: Any = None
        try:
            if probe.series or probe.needs is Needs.WEIGHTS:
                raise TypeError("a plug-in measures gradients or steps, and gives scalars: no series")
            self._measuring = probe.make(**options)
        except Exception as error:  # noqa: BLE001 - third-party code; never break the user's training
            left_out(self._name, error)

    def measure(self, *given: Any) -> dict[str, Any]:
        """Return scalars, none where the plug-in raises or has raised."""
        if self._measuring is None:
            return {}
        try:
            found = self._measuring.measure(*given)
            return {f"{self._name}/{name}": _scalar(name, value) for name, value in dict(found).items()}
        except Exception as error:  # noqa: BLE001 - third-party code; never break the user's training
            self._measuring = None
            self._left_out(self._name, error)
            return {}

    def before(self, *_: Any) -> None:
        """Do nothing: what asks for weights is left out."""

    def after(self, *_: Any) -> None:
        """Do nothing: what asks for weights is left out."""


def _scalar(name: str, value: Any) -> Any:
    """Return a number, or a tensor with one element, which is read off the step's path.

    Raises
    ------
    TypeError
        If it is neither.
    """
    if not hasattr(value, "numel"):
        return float(value)
    if value.numel() != 1:
        raise TypeError(f"{name}: expected one number, got {value.numel()}")
    return value.detach()


def monitors_with_probes() -> tuple[str, ...]:
    """Return the monitors that measure something of a training, by name."""
    return tuple(sorted({"stalls", "grokking", "spectra"} | {probe.monitor for _, probe in PROBES.items()}))


def check_monitors(monitors: Iterable[str]) -> None:
    """Refuse what is no monitor.

    Raises
    ------
    ValueError
        If one of ``monitors`` does not exist.
    """
    known = monitors_with_probes()
    for monitor in monitors:
        if monitor not in known:
            raise ValueError(f"no monitor is called {monitor!r}; expected some of: {', '.join(known)}")


def make_plan(
    monitors: Collection[str],
    requested: Collection[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    left_out: Callable[[str, Exception], None] = _said,
) -> Plan:
    """Build the probes of ``monitors``.

    Parameters
    ----------
    monitors:
        Monitors by name.
    requested:
        Names of probes that are otherwise only there on request.
    options:
        Keyword arguments by probe name; ``spacing`` replaces what the probe declares.
    left_out:
        Called with the name of a plug-in's probe and what it raised, once.

    Returns
    -------
    Plan
        The probes; gradient probes on request that nobody requested are in ``detailed``, for the
        steps after a finding.

    Raises
    ------
    ValueError
        If a monitor does not exist.
    """
    check_monitors(monitors)
    # Those of plug-ins come last: the first one of gradients is the house's.
    named = sorted(PROBES.items(), key=lambda item: (PROBES.origin(item[0]) is not None, item[0]))
    wanted = [p for _, p in named if p.monitor in monitors]
    on = [p for p in wanted if not p.on_request or p.name in requested]
    off = [p for p in wanted if p not in on and p.needs is Needs.GRADIENTS]

    def activate(probe: Probe) -> Active:
        given = dict((options or {}).get(probe.name, {}))
        spacing = int(given.pop("spacing", probe.spacing))
        if PROBES.origin(probe.name) is not None:
            return Active(probe, Foreign(probe, given, left_out), spacing)
        return Active(probe, probe.make(**given), spacing)

    def made(probes: list[Probe], needs: Needs) -> tuple[Active, ...]:
        return tuple(activate(p) for p in probes if p.needs is needs)

    return Plan(
        tuple(monitors),
        made(on, Needs.GRADIENTS),
        made(off, Needs.GRADIENTS),
        made(on, Needs.WEIGHTS),
        made(on, Needs.STEPS),
    )
