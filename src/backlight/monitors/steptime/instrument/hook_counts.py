"""Hooks of modules and parameters that grow from step to step: a loop that registers them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from backlight.monitors.steptime.instrument.kept_tensors import MIN_READINGS
from backlight.user_code import SourceLine, definition, is_user_code

if TYPE_CHECKING:
    from torch import nn

_OF_MODULES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_OF_PARAMETERS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "gradient hook"}
"""Attributes with hooks, and what they are called."""


class HookCounts:
    """Counts the hooks of modules and parameters, and records what gets a further one in each step.

    ``record(facts, step)`` gets facts as JSON types: the name, the kind of its hooks and how many there are,
    since which step they grow, of how many names, and the line that defines the newest; no names once they
    have ceased to grow. Each step has to add one between :data:`MIN_READINGS` readings in a row.
    :meth:`read` is called on the training thread, at few steps.
    """

    def __init__(self, record: Callable[[dict[str, Any], int], None]) -> None:
        self._record = record
        self._step = 0
        self._is_reported = False
        self._readings: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def read(self, step: int, roots: Iterable[tuple[str, nn.Module]]) -> None:
        """Count the hooks after ``step``; ``roots`` are root modules with the prefixes of their names."""
        earlier, before, self._readings, self._step = self._readings, self._step, {}, step
        lines: dict[tuple[str, str], SourceLine | None] = {}
        for key, hooks in _tables(roots):
            readings = earlier.get(key, [])
            is_grown = bool(readings) and len(hooks) - readings[-1][1] >= step - before
            self._readings[key] = [*(readings if is_grown else []), (step, len(hooks))]
            lines[key] = definition(next(reversed(hooks.values())))
        growing = {key: r[-1][1] for key, r in self._readings.items() if len(r) >= MIN_READINGS}
        if not growing:
            if self._is_reported:
                self._is_reported = False
                self._record({"names": 0}, step)
            return
        self._is_reported = True
        most = max(growing, key=lambda key: growing[key])
        line = lines[most]
        self._record(
            {
                "name": most[0], "kind": most[1], "hooks": growing[most], "names": len(growing),
                "since": self._readings[most][0][0],
                "line": str(line) if line is not None and is_user_code(line.path) else None,
            },
            step,
        )  # fmt: skip


def _tables(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, str], dict[int, Any]]]:
    """Yield names of modules and parameters with what their hooks are called, and the hooks."""
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix.rstrip(".")):
            for attribute, kind in _OF_MODULES.items():
                if hooks := getattr(module, attribute, None):
                    yield (name or type(module).__name__, kind), hooks
            for last, parameter in module._parameters.items():
                for attribute, kind in _OF_PARAMETERS.items():
                    if parameter is not None and (hooks := getattr(parameter, attribute, None)):
                        yield (f"{name}.{last}" if name else last, kind), hooks
