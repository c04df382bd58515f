"""Whether a state that is loaded while a script trains is the module's own, not a copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.restored_state import OtherState, OwnState
from backlight.user_code import user_line


class OwnStates(Check):
    """Reports ``load_state_dict`` of a module's own tensors: it changes nothing.

    Before the first step that may serve to run hooks. Distributed checkpoints are read into the tensors of a
    state, which is then loaded. Of a line that also loads other states, as a population may load the best of
    its members, nothing is reported.
    """

    name = "own_states"
    steps = "all"

    def _start(self) -> None:
        self._is_own = False
        self._lines: set[str] = set()  # that have loaded a module's own state

    def own_state_loaded(self, module: nn.Module) -> None:
        """Note it until the state follows."""
        self._is_own = True

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Compare the state with the tensors of the module."""
        is_own, self._is_own = self._is_own, False
        if not self.run.clock.done or HUB.own_passes or "torch.distributed.checkpoint" in sys.modules:
            return
        line = str(user_line() or "")
        if is_own and line:
            self._lines.add(line)
            self.report(OwnState(self.step, kind_of(module), line))
        elif line in self._lines:
            self._lines.remove(line)
            self.report(OtherState(self.step, line))
