"""Which line of the forward made the nodes of a backward, from looks at it while it ran. No torch.

The helper thread notes, a few times per second and only while a graph takes long to build, the number of the
newest node and the line at which the training is. Nodes made between two looks at the same loop are that
loop's; where the line changed between them, half each. So shares of loops that run one after the other are
counted, while lines that take turns faster than the looks come are told apart by their time. The loop that
calls backward is the step itself and explains nothing: it is left out.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backlight.monitors.stalls.model.stacks import Frame

FEWEST = 8
"""Looks without which no share is given."""

WIDEST = 0.25
"""Uncertainty beyond which a share says nothing."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Place = tuple[str, int, bool]
"""File, line, and whether a loop begins there."""


@dataclass(frozen=True)
class GraphBuild:
    """Looks at the building of a graph whose nodes have the numbers ``base`` to ``root``.

    ``looks`` are pairs of a number and a place in ``stacks``, which hold the user's frames, innermost first.
    Numbers beyond ``root`` belong to what backward computes again. ``caller`` is where backward was called.
    """

    base: int
    root: int
    samples: tuple[tuple[int, int], ...]
    stacks: tuple[tuple[Frame, ...], ...]
    caller: tuple[Frame, ...] = ()

    @property
    def again(self) -> int:
        """Nodes that were seen to be made inside backward, by recomputation."""
        return max(self.samples[-1][0] - self.root, 0) if self.samples and self.root >= 0 else 0


@dataclass(frozen=True)
class NodeShare:
    """A part of the nodes, with the line that made them; ``share`` and ``margin`` between 0 and 1."""

    file: str
    line: int
    loop: bool
    share: float
    margin: float
    samples: int
    again: bool

    @property
    def words(self) -> str:
        """The share as it stands in a verdict, with how it was found."""
        where = f"{Path(self.file).name}:{self.line}{' (a Python loop)' if self.loop else ''}"
        percent, margin = 100 * self.share, math.ceil(100 * self.margin)
        when = "recomputation" if self.again else "forward"
        nodes = "the nodes made again" if self.again else "the nodes"
        how = f"by {self.samples} looks at {when}"
        return f"about {percent:.0f} % (± {margin}) of {nodes} come from {where}, {how}"


def read(data: Any) -> GraphBuild | None:
    """Read what the helper thread wrote; None for nothing, or for what is not understood."""
    try:
        stacks = tuple(tuple(Frame(str(f), int(n), str(q)) for f, n, q in stack) for stack in data["stacks"])
        caller = tuple(Frame(str(f), int(n), str(q)) for f, n, q in data["caller"])
        samples = tuple((int(number), int(place)) for number, place in data["samples"])
        return GraphBuild(int(data["base"]), int(data["root"]), samples, stacks, caller)
    except (KeyError, TypeError, ValueError):
        return None


def find_largest_share(graph_build: GraphBuild | None) -> NodeShare | None:
    """Return the line or loop that made the most nodes, None where that is not known well enough."""
    if graph_build is None:
        return None
    first = [sample for sample in graph_build.samples if sample[0] <= graph_build.root]
    again = [sample for sample in graph_build.samples if sample[0] > graph_build.root]
    if len(first) >= FEWEST or not again:
        return _largest(graph_build, first, graph_build.base, graph_build.root + 1, again=False)
    return _largest(graph_build, again, again[0][0], again[-1][0], again=True)


def _largest(
    graph_build: GraphBuild, samples: list[tuple[int, int]], begin: int, end: int, *, again: bool
) -> NodeShare | None:
    if len(samples) < FEWEST or end <= begin:
        return None
    step = {loop for frame in graph_build.caller for loop in enclosing_loops(frame.file, frame.line)}
    runtime_directories = [_place(graph_build.stacks[place], step) for _, place in samples]
    counted: dict[Place, float] = {}
    halved: dict[Place, float] = {}
    for (here, a), (there, b) in zip(
        zip((n for n, _ in samples), runtime_directories, strict=True),
        zip((n for n, _ in samples[1:]), runtime_directories[1:], strict=True),
        strict=False,
    ):
        for place in (a, b):
            if place is not None:
                counted[place] = counted.get(place, 0.0) + (there - here) / 2
                if a != b:
                    halved[place] = halved.get(place, 0.0) + (there - here) / 2
    seen = samples[-1][0] - samples[0][0]
    if not counted or seen <= 0:
        return None
    place = max(counted, key=lambda key: counted[key])
    share = counted[place] / seen
    chance = 2 * math.sqrt(max(share * (1 - share), 0.0) / len(samples))
    unseen = max(1 - seen / (end - begin), 0.0)
    # Looks that alternate are a sample, looks that follow one another bound each change of line.
    margin = min(chance, halved.get(place, 0.0) / seen) + unseen
    if margin > WIDEST:
        return None
    return NodeShare(place[0], place[1], place[2], share, max(margin, 0.01), len(samples), again)


def _place(stack: tuple[Frame, ...], step: set[tuple[str, int]]) -> Place | None:
    for frame in stack:
        loops = [loop for loop in enclosing_loops(frame.file, frame.line) if loop not in step]
        if loops:
            return (*loops[0], True)
    return (stack[0].file, stack[0].line, False) if stack else None


def enclosing_loops(file: str, line: int) -> list[tuple[str, int]]:
    """Return the loops around a line, innermost first, as file and first line."""
    around = [(end - begin, begin) for begin, end in _loops(file) if begin <= line <= end]
    return [(file, begin) for _, begin in sorted(around)]


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    found = {(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, _LOOPS)}
    return tuple(sorted(found))
