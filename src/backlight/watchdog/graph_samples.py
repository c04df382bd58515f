"""Lines of the forward pass that made the nodes of a backward pass, estimated from samples. No torch.

A few times per second, while a graph takes long to build, the sampler thread records the number of the newest
node and the line of the training thread. Nodes made between two samples in the same loop belong to that loop;
where the line changed, half to each. So shares of consecutive loops are counted, while lines that alternate
faster than the samples are separated by their time. The loop that calls backward is the step itself and is
left out.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backlight.watchdog.stacks import Frame, parse_frames

MIN_SAMPLES = 8
"""Samples without which no share is reported."""

MAX_MARGIN = 0.25
"""Uncertainty beyond which a share is not reported."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_Location = tuple[str, int, bool]
"""File, line, and whether a loop begins there."""


@dataclass(frozen=True)
class GraphBuild:
    """Samples of the construction of a graph whose nodes have the numbers ``base`` to ``root``."""

    base: int
    root: int  # what lies beyond belongs to recomputation in backward
    samples: tuple[tuple[int, int], ...]  # number of a node, index into the stacks
    stacks: tuple[tuple[Frame, ...], ...]  # the user's frames, innermost first
    caller: tuple[Frame, ...] = ()  # the stack that called backward

    @property
    def recomputed(self) -> int:
        """Nodes that recomputation inside backward has made so far."""
        return max(self.samples[-1][0] - self.root, 0) if self.samples and self.root >= 0 else 0


@dataclass(frozen=True)
class NodeShare:
    """The share of the nodes that one line or loop made; ``share`` and ``margin`` between 0 and 1."""

    file: str
    line: int
    is_loop: bool
    share: float
    margin: float
    samples: int
    recomputed: bool


def parse_graph_build(data: Any) -> GraphBuild:
    """Return the document of the sampler thread as a record."""
    samples = tuple((int(number), int(index)) for number, index in data["samples"])
    stacks = tuple(map(parse_frames, data["stacks"]))
    return GraphBuild(int(data["base"]), int(data["root"]), samples, stacks, parse_frames(data["caller"]))


def find_largest_share(build: GraphBuild | None) -> NodeShare | None:
    """Return the line or loop that made most nodes, None where the samples do not determine it."""
    if build is None:
        return None
    forward = [sample for sample in build.samples if sample[0] <= build.root]
    recomputed = [sample for sample in build.samples if sample[0] > build.root]
    if len(forward) >= MIN_SAMPLES or not recomputed:
        return _largest(build, forward, build.base, build.root + 1, recomputed=False)
    return _largest(build, recomputed, recomputed[0][0], recomputed[-1][0], recomputed=True)


def _largest(
    build: GraphBuild, samples: list[tuple[int, int]], begin: int, end: int, *, recomputed: bool
) -> NodeShare | None:
    if len(samples) < MIN_SAMPLES or end <= begin:
        return None
    step_loops = {loop for frame in build.caller for loop in enclosing_loops(frame.file, frame.line)}
    located = [(number, _locate(build.stacks[index], step_loops)) for number, index in samples]
    counts, halves = Counter[_Location](), Counter[_Location]()
    for (number, a), (later, b) in itertools.pairwise(located):
        for location in (a, b):
            if location is not None:
                counts[location] += later - number
                halves[location] += (later - number) * (a != b)
    sampled = samples[-1][0] - samples[0][0]
    if not counts or sampled <= 0:
        return None
    ((largest, twice),) = counts.most_common(1)
    share = twice / 2 / sampled
    chance = 2 * math.sqrt(max(share * (1 - share), 0.0) / len(samples))
    unsampled = max(1 - sampled / (end - begin), 0.0)
    # Alternating samples are a random sample; consecutive ones bound each change of line.
    margin = min(chance, halves[largest] / 2 / sampled) + unsampled
    if margin > MAX_MARGIN:
        return None
    return NodeShare(*largest, share, max(margin, 0.01), len(samples), recomputed)


def _locate(stack: tuple[Frame, ...], step_loops: set[tuple[str, int]]) -> _Location | None:
    for frame in stack:
        for loop in enclosing_loops(frame.file, frame.line):
            if loop not in step_loops:
                return (*loop, True)
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
    loops = {(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, _LOOPS)}
    return tuple(sorted(loops))
