"""Sequences of kernels that repeat on a stream, such as the layers of a model.

The most frequent pair of neighbours is replaced by one symbol, again and again (Re-Pair: Larsson and Moffat,
Offline dictionary-based compression, 2000). A symbol that is left stands for a sequence that repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.device_queues import by_stream
from backlight.trace.events import Integers
from backlight.trace.operators import Costs

MIN_COUNT = 4
"""Repetitions of a sequence."""

MAX_SYMBOLS = 64
"""Pairs that are replaced at most."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of kernels on one stream: its occurrences, and the device time of all of them in ns."""

    kernels: tuple[str, ...]
    stream: int
    count: int
    device: int


def sequences(costs: Costs) -> list[Sequence]:
    """Return sequences of two or more kernels that repeat in the chosen steps, the most expensive first."""
    timeline = costs.timeline
    device, words = timeline.device, timeline.events.words["name"]
    found = []
    for _, stream, rows in by_stream(timeline, costs.device_rows):
        codes, names = np.unique(timeline.events["name"][device.rows[rows]], return_inverse=True)
        symbols, spent, pairs = _paired(names, (device.end - device.start)[rows], len(codes))
        for symbol in np.unique(symbols[symbols >= len(codes)]).tolist():
            here = symbols == symbol
            kernels = tuple(words[codes[code]] for code in _spelled(symbol, pairs, len(codes)))
            found.append(Sequence(kernels, stream, int(here.sum()), int(spent[here].sum())))
    return sorted((one for one in found if one.count >= MIN_COUNT), key=lambda one: -one.device)


def _paired(
    symbols: Integers, spent: Integers, base: int
) -> tuple[Integers, Integers, list[tuple[int, int]]]:
    """Replace pairs; return the symbols, the time of each, and what symbol ``base + i`` stands for."""
    pairs: list[tuple[int, int]] = []
    size = base + MAX_SYMBOLS
    while len(symbols) > 1 and len(pairs) < MAX_SYMBOLS:
        first, second = divmod(int(np.argmax(np.bincount(symbols[:-1] * size + symbols[1:]))), size)
        at = np.flatnonzero((symbols[:-1] == first) & (symbols[1:] == second))
        if first == second:  # of a run of equal symbols every other pair
            run = np.cumsum(np.concatenate(([0], np.diff(at) > 1)))
            begin = at[np.searchsorted(run, run)]
            at = at[(at - begin) % 2 == 0]
        if len(at) < MIN_COUNT:
            break
        symbols, spent = symbols.copy(), spent.copy()
        symbols[at] = base + len(pairs)
        spent[at] += spent[at + 1]
        symbols, spent = np.delete(symbols, at + 1), np.delete(spent, at + 1)
        pairs.append((first, second))
    return symbols, spent, pairs


def _spelled(symbol: int, pairs: list[tuple[int, int]], base: int) -> list[int]:
    if symbol < base:
        return [symbol]
    first, second = pairs[symbol - base]
    return [*_spelled(first, pairs, base), *_spelled(second, pairs, base)]
