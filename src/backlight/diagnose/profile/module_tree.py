"""Modules of a profile as a tree, with traced times brought to the scale of the clocked steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from backlight.diagnose.profile.step_summary import StepProfile
from backlight.records import Phase
from backlight.trace.module_times import ModuleTime


@dataclass(frozen=True)
class ModuleRow:
    """One module: its depth below the model, and milliseconds of a clocked step, forward and backward.

    ``total_ms`` includes the modules inside, ``self_ms`` does not; ``share`` is that of the total in a step.
    """

    name: str
    depth: int
    total_ms: float
    self_ms: float
    share: float


def module_tree(
    modules: Sequence[ModuleTime], profile: StepProfile, traced_phases: Mapping[str, float]
) -> tuple[ModuleRow, ...] | None:
    """Return the modules depth first, siblings with the most time first.

    Forward and backward are scaled by what the phase takes in a clocked step over what it takes in a traced
    one. None where the clock does not separate one of them, or no steady step was found.
    """
    scale = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        traced = traced_phases.get(phase)
        if profile.step is None or phase not in profile.phases or not traced:
            return None
        scale[phase] = profile.phases[phase].share * profile.step.median_ms / traced
    step = profile.step.median_ms if profile.step is not None else 0.0
    ahead, behind = scale[Phase.FORWARD], scale[Phase.BACKWARD]
    by_name = {module.name: module for module in modules}
    children: defaultdict[str | None, list[ModuleTime]] = defaultdict(list)
    for module in modules:
        children[_parent(module.name, by_name)].append(module)

    def total(module: ModuleTime) -> float:
        return module.forward_ms * ahead + module.backward_ms * behind

    def rows(parent: str | None, depth: int) -> Iterator[ModuleRow]:
        for module in sorted(children[parent], key=total, reverse=True):
            exclusive = module.forward_exclusive_ms * ahead + module.backward_exclusive_ms * behind
            yield ModuleRow(module.name, depth, total(module), exclusive, total(module) / step)
            yield from rows(module.name, depth + 1)

    return tuple(rows(None, 0))


def _parent(name: str, called: Mapping[str, ModuleTime]) -> str | None:
    """Return the nearest module outside of one that was called, None for the model."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
