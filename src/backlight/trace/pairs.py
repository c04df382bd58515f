"""Forward operators and the backward that belongs to them, joined by autograd's sequence number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace import categories
from backlight.trace.call_tree import Tree
from backlight.trace.events import Integers
from backlight.trace.operators import Costs

_WRAPPER = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Pair:
    """Operators of one name with their backward; times in nanoseconds, what they call included."""

    forward: str
    backward: str
    calls: int
    forward_host: int
    backward_host: int
    forward_device: int
    backward_device: int


def joined(costs: Costs) -> tuple[Integers, Integers]:
    """Return places in the tree of joined forward and backward operators, int64 [J] each.

    Autograd gives a backward node the number of the forward call that recorded it. Operators that
    call others carry the number of what they call next, so the last to start is the one that recorded.
    """
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    sequence, thread = events["sequence"][tree.rows], events["forward_thread"][tree.rows]
    operator = categories.rows(events, categories.OPERATOR)[tree.rows] & (sequence >= 0)
    wrapped = [word.startswith(_WRAPPER) for word in events.words["name"]]
    behind = operator & categories.named(events, wrapped)[tree.rows]
    if not behind.any():
        behind = operator & (thread > 0)
    ahead = operator & (thread <= 0)
    ahead_places, behind_places = np.flatnonzero(ahead), np.flatnonzero(behind)
    chosen = np.zeros(len(tree.rows), bool)
    chosen[costs.host_rows] = True
    behind_places = behind_places[chosen[behind_places]]
    places = np.concatenate((ahead_places, behind_places))
    is_behind = np.concatenate((np.zeros(len(ahead_places), bool), np.ones(len(behind_places), bool)))
    order = np.lexsort((is_behind, tree.start[places], sequence[places]))
    places, is_behind = places[order], is_behind[order]
    number = sequence[places]
    # Carry the last forward along; it belongs to a backward only if the number is the same.
    last = np.maximum.accumulate(np.where(is_behind, -1, np.arange(len(places)))) if len(places) else places
    found = is_behind & (last >= 0)
    found[found] = number[last[found]] == number[found]
    return places[last[found]], places[found]


def sizes(tree: Tree) -> Integers:
    """Return how many events the subtree of each place holds, itself included, int64 [H]."""
    size = np.ones(len(tree.rows), np.int64)
    for level in range(int(tree.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(tree.depth == level)
        np.add.at(size, tree.parent[here], size[here])
    return size


def device_time(costs: Costs) -> Integers:
    """Return device time launched from the subtree of each place, in nanoseconds, int64 [H]."""
    tree, device = costs.timeline.tree, costs.timeline.device
    own = np.zeros(len(tree.rows), np.int64)
    launch = device.launch[costs.device_rows]
    np.add.at(own, launch[launch >= 0], costs.shares[launch >= 0])
    total = np.concatenate(([0], np.cumsum(own)))
    here = np.arange(len(tree.rows))
    result: Integers = total[here + sizes(tree)] - total[here]
    return result


def pairs(costs: Costs, device: Integers) -> list[Pair]:
    """Return joined operators by name, the most expensive first; ``device`` is from :func:`device_time`."""
    timeline = costs.timeline
    tree, names = timeline.tree, timeline.events["name"]
    ahead, behind = joined(costs)
    words = timeline.events.words["name"]
    key = names[tree.rows[ahead]].astype(np.int64) * len(words) + names[tree.rows[behind]]
    found = []
    host = tree.end - tree.start
    for code in np.unique(key):
        here = key == code
        # Several nodes may have recorded under one forward, whose time counts once.
        once = np.unique(ahead[here])
        found.append(
            Pair(
                words[int(code) // len(words)],
                words[int(code) % len(words)].removeprefix(_WRAPPER),
                int(here.sum()),
                int(host[once].sum()),
                int(host[behind[here]].sum()),
                int(device[once].sum()),
                int(device[behind[here]].sum()),
            )
        )
    return sorted(
        found,
        key=lambda p: (p.forward_device + p.backward_device, p.forward_host + p.backward_host),
        reverse=True,
    )
