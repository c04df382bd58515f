"""Records what the run is: its fingerprint, and groups of parameters that match nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from backlight.capture.fingerprint import take_fingerprint
from backlight.monitor import Monitor, RunContext
from backlight.monitors.health.model.parameters import GroupError, members
from backlight.text import as_typed

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import ParameterTable
    from backlight.records import Fingerprint
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
        found = take_fingerprint(self._run.scope, self._run.arguments)
        expected = self._run.writer.expected_fingerprint
        if expected is not None and _is_another_model(found, expected):
            sizes = expected.parameter_count, found.parameter_count
            what = f"{sizes[0]} parameters, this script has {sizes[1]}"
            if sizes[0] == sizes[1]:
                what = "of other modules or shapes than this script's"
            path = as_typed(self._run.path)
            self._run.abandon(f"{path}: holds another training run ({what}); choose another --out")
            return
        self._run.writer.fingerprint(found)
        names = [record.name for record in table.records]
        for group, pattern in self._groups.items():
            try:
                members(names, pattern)
            except GroupError as error:
                self._run.notifier.unmeasured(f"group {group}", str(error))
                self._run.notifier.warn(f"group {group}", f"the group {group!r} is not measured: {error}")


def _is_another_model(found: Fingerprint, expected: Fingerprint) -> bool:
    """Return whether module tree or shapes differ; with another number of ranks they may without meaning."""
    return found.world_size == expected.world_size and found.module_hash != expected.module_hash
