"""Chains of elementwise operations, each on the result of the one before: what one kernel could do.

Operators that follow each other on a thread within one module and one phase, with nothing but views
between them, are taken as a chain; which tensor each reads is not in a trace, so that a chain here is what
could be fused, not what must be.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from backlight.records import Phase
from backlight.trace.events import Trace
from backlight.trace.kinds import Kind
from backlight.trace.module_times import ENGINE, MODULE
from backlight.trace.operators import Costs
from backlight.trace.pairs import device_time
from backlight.trace.phases import PHASES
from backlight.trace.timeline import KINDS, Timeline

SHORTEST = 3
"""Operations from which it is a chain: two are a bias and its activation, which gain little."""

_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "t",
        "detach", "alias", "view_as", "flatten", "unflatten", "narrow", "result_type", "empty_like",
    )
)  # fmt: skip

_FUSED = (Phase.OPTIMIZER, Phase.CLIP, Phase.DATA)
"""Phases with remedies of their own."""


@dataclass(frozen=True)
class Chain:
    """Chains of the same operators in one place, per step; times are of the operators with what they call."""

    operators: tuple[str, ...]
    module: str
    phase: str
    length: int
    calls: float
    host_ms: float
    device_ms: float


def chains(trace: Trace, steps: int) -> tuple[Chain, ...]:
    """Return the chains of a trace, those with the most time first."""
    timeline = Timeline(trace)
    tree, events = timeline.tree, timeline.events
    words = events.words["name"]
    if not len(tree.rows):
        return ()
    names = events["name"][tree.rows]
    ignored = np.array([word.startswith(ENGINE) or word.endswith("Backward0") for word in words] + [True])
    operators = (timeline.operators == np.arange(len(tree.rows))) & ~ignored[names]
    # Outermost operators only: what they call is theirs.
    above = tree.inherited(np.where(operators, np.arange(len(tree.rows)), -1))
    outermost = operators & ~np.where(tree.parent >= 0, above[tree.parent] >= 0, False)
    marks = np.array([word.startswith(MODULE) for word in words] + [False])[names]
    modules = tree.inherited(np.where(marks, np.arange(len(tree.rows)), -1))
    inside = timeline.step_of(tree.start)
    spent = device_time(Costs(timeline, timeline.steps))
    elementwise = timeline.kinds[names] == KINDS.index(Kind.ELEMENTWISE)
    found: dict[tuple[tuple[str, ...], str, str], list[tuple[int, int]]] = defaultdict(list)
    run: list[int] = []

    def end() -> None:
        if len(run) >= SHORTEST:
            module = int(modules[run[0]])
            where = words[names[module]].removeprefix(MODULE) if module >= 0 else ""
            key = tuple(words[names[p]] for p in run), where, PHASES[timeline.phases[run[0]]].value
            host = sum(int(tree.end[p] - tree.start[p]) for p in run)
            found[key].append((host, sum(int(spent[p]) for p in run)))
        run.clear()

    before: tuple[int, ...] = ()
    fused = {PHASES.index(phase) for phase in _FUSED}
    for place in np.flatnonzero(outermost & (inside >= 0)).tolist():
        here = tuple(int(c[place]) for c in (tree.thread, modules, timeline.phases, inside))
        if here != before:
            end()
            before = here
        if elementwise[place] and here[2] not in fused:
            run.append(place)
        elif words[names[place]] not in _VIEWS:
            end()
    end()
    rows = [
        Chain(
            operators, module, phase, len(operators), len(times) / steps,
            sum(host for host, _ in times) / steps / 1e6, sum(device for _, device in times) / steps / 1e6,
        )
        for (operators, module, phase), times in found.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.device_ms, -row.host_ms)))
