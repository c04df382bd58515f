"""Records what the run is: its fingerprint, and groups of parameters that match nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from backlight.capture.fingerprint import take_fingerprint
from backlight.monitor import Monitor, RunContext
from backlight.monitors.health.model.parameters import GroupError, members

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import ParameterTable
    from backlight.session.settings import Settings


class FingerprintMonitor(Monitor):
    """Takes the fingerprint once the first step is over; part of every watch."""

    name = "fingerprint"
    requested_by = None
    records = "the fingerprint"

    def __init__(self, groups: dict[str, str]) -> None:
        self._groups = groups

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor, whatever is requested."""
        return cls(settings.groups)

    def check_models(self, models: Sequence[nn.Module], table: ParameterTable) -> None:
        """Refuse groups that match no parameter of the given models."""
        for pattern in self._groups.values():
            members([record.name for record in table.records], pattern)

    def attach(self, run: RunContext) -> None:
        """Remember where the fingerprint goes."""
        self._run = run

    def on_parameters_known(self) -> None:
        """Take the fingerprint, and look for groups without parameters."""
        table = self._run.scope.table
        self._run.writer.fingerprint(take_fingerprint(self._run.scope, self._run.arguments))
        names = [record.name for record in table.records]
        for group, pattern in self._groups.items():
            try:
                members(names, pattern)
            except GroupError as error:
                self._run.notifier.unmeasured(f"group {group}", str(error))
                self._run.notifier.warn(f"group {group}", f"the group {group!r} is not measured: {error}")
