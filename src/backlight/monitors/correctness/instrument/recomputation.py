"""Checkpointed regions: what a recomputation uses and computes, compared with the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backlight import devices
from backlight.capture.calls import module_names
from backlight.capture.checkpoint_regions import (
    CheckpointedRegion,
    RegionState,
    differences,
    modules_of,
    other_modules,
    other_variable,
    parameter_of,
    region_state,
    variable_differences,
)
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.parameters import candidates, named_roots
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import sampled
from backlight.monitors.correctness.rules.recomputation import OtherModules, OtherRandomNumbers, OtherValues
from backlight.user_code import user_line

SAMPLES = 128
"""Tensors of the regions of a step of which values are compared."""

SAMPLED_VALUES = 16
"""Values of a tensor that are compared."""

MAX_MODULES = 32
"""Modules of a region whose attributes are compared, to name the cause."""

OTHER_VALUES = 0.05
"""Distance between samples, relative to their norm, above which no rounding explains it."""


@dataclass(eq=False)
class _Run:
    """One run of a region: the parameters that it saves and samples of what it computes, by their place."""

    state: RegionState
    parameters: dict[int, str] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)
    tensors: int = 0


@dataclass(eq=False)
class _Record:
    """A region that is followed: its number in the forward, and its runs."""

    step: int
    number: int
    forward: _Run
    again: _Run | None = None


class Recomputation(Check):
    """``recomputation_differs``: a region whose recomputation is not that of its forward."""

    name = "recomputation"

    def _start(self) -> None:
        self._states: list[tuple[CheckpointedRegion, list[Tensor]]] = []
        self._running: list[CheckpointedRegion] = []
        self._number = self._sampled = 0
        self._other: dict[str, list[tuple[int, str]]] = {}
        self._names: dict[int, str] = {}  # of modules and parameters; filled at the first region
        self._is_refreshed = False

    def forget(self) -> None:
        """Drop the regions in progress."""
        self._states.clear()
        self._running.clear()
        self._other.clear()
        self._number = self._sampled = 0

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Drop regions that raised; those of the next forward count from one."""
        self._states.clear()
        self._running.clear()
        self._number = self._sampled = 0
        self._is_refreshed = False

    def backward_end(self) -> None:
        """Report the regions that ran other modules."""
        departures, self._other = self._other, {}
        for line, regions in departures.items():
            _, text = min(regions)
            self.report(OtherModules(self.step, line, text, len(regions)))

    def region_begin(self, region: CheckpointedRegion) -> None:
        """Follow an outermost region, and read the random state where it is not preserved."""
        if not self.due or devices.is_capturing_graph():
            return
        if not region.preserves_random and not region.is_reentrant:
            self._states.append((region, _random_states()))
        self._running.append(region)
        if len(self._running) == 1:
            self._number += 1
            state = self._state_of(region.function)
            region.line = str(user_line() or "")
            region.record = _Record(self.step, self._number, _Run(state))

    def region_end(self, region: CheckpointedRegion) -> None:
        """Compare the random state."""
        if region in self._running:
            self._running.remove(region)
        if self._states and self._states[-1][0] is region and not devices.is_capturing_graph():
            _, before = self._states.pop()
            if any(not torch.equal(state, now) for state, now in zip(before, _random_states(), strict=True)):
                self.report(OtherRandomNumbers(self.step, str(user_line() or "")))

    def region_tensor(self, region: CheckpointedRegion, tensor: Tensor) -> None:
        """Record a parameter, or values of what depends on parameters."""
        record: _Record = region.record
        run = record.again or record.forward
        place, run.tensors = run.tensors, run.tensors + 1
        if is_transforming() or devices.is_capturing_graph():
            return
        if not region.is_reentrant and (parameter := parameter_of(tensor)) is not None:
            run.parameters[place] = self._name_of(parameter)
        elif run is record.again:
            if place in record.forward.samples and _has_values(tensor):
                run.samples[place] = sampled(tensor, SAMPLED_VALUES).clone()
        elif self._sampled < SAMPLES and _has_values(tensor) and (region.is_reentrant or tensor.grad_fn):
            self._sampled += 1
            run.samples[place] = sampled(tensor, SAMPLED_VALUES).clone()

    def recomputation_begin(self, region: CheckpointedRegion) -> None:
        """Begin a record of the recomputation."""
        if region.record.step == self.step:
            self._running.append(region)
            region.record.again = _Run(self._state_of(region.function))

    def recomputation_end(self, region: CheckpointedRegion) -> None:
        """Compare the recomputation with the forward, as far as it went."""
        record: _Record = region.record
        if region in self._running:
            self._running.remove(region)
        if record.again is None:
            return
        forward, again, record.again = record.forward, record.again, None
        before, after = forward.state, self._state_of(region.function)
        causes = [*variable_differences(before, again.state), *differences(before, again.state, after)]
        for place, name in forward.parameters.items():
            if name and (other := again.parameters.get(place, name)) and other != name:
                text = other_modules(record.number, name, other)
                self._other.setdefault(region.line, []).append((record.number, text))
                return
        renamed = other_variable(before, again.state)
        text = other_modules(record.number, *renamed) if renamed is not None else ""
        compare = partial(self._compare, record.step, record.number, region.line, text, tuple(causes[:2]))
        both = [place for place in forward.samples if place in again.samples]
        pairs = [(forward.samples[place], again.samples[place]) for place in both]
        pairs = [(first, second) for first, second in pairs if first.shape == second.shape]
        if pairs:
            self.when_known(compare, *(value for pair in pairs for value in pair))

    def _compare(
        self, step: int, number: int, line: str, text: str, causes: tuple[str, ...], *values: Any
    ) -> None:
        if not any(_differ(*pair) for pair in zip(values[::2], values[1::2], strict=True)):
            return
        if text and step == self.step:
            self._other.setdefault(line, []).append((number, text))
        elif text:  # from a device, once the backward is over
            self.report(OtherModules(step, line, text, 1))
        else:
            self.report(OtherValues(step, line, number, causes))

    def _state_of(self, function: Any) -> RegionState:
        modules = modules_of(function)
        if modules:
            self._name_of(modules[0])
        followed = modules if len(modules) <= MAX_MODULES else ()
        return region_state(function, followed, self._names, reads_values=False)

    def _name_of(self, part: Any) -> str:
        """Return the name of a module or a parameter, which the table of the run may not hold yet."""
        if id(part) not in self._names and not self._is_refreshed:
            self._is_refreshed = True
            roots = named_roots(HUB.seen)
            self._names = module_names(roots)
            self._names |= {id(candidate.parameter): candidate.name for candidate in candidates(roots)}
        return self._names.get(id(part), "")


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, *devices.accelerator_random_states()] if devices.is_in_use() else states


def _has_values(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def _differ(forward: Any, again: Any) -> bool:
    before, after = np.asarray(forward, np.float64), np.asarray(again, np.float64)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return False
    size = max(np.linalg.norm(before), np.linalg.norm(after))
    return bool(np.linalg.norm(before - after) > OTHER_VALUES * size)
