"""Collectives of one rank, each with the ranks of its process group."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import numpy as np

from backlight.trace.classification import HOST, Kind
from backlight.trace.events import ITEM_BYTES, MISSING, Integers, Trace
from backlight.trace.timeline import Timeline

GLOO = "gloo:"
"""Prefix of the annotation of a collective of gloo, which ends with the collective."""


@dataclass(frozen=True)
class TracedCollective:
    """One collective: nanoseconds on the trace's clock, and the ranks of its group, None where unknown.

    ``operation`` is what torch calls it, such as ``allreduce``, empty where that is not recorded; ``bytes``
    is what a rank gives, None where unknown.
    """

    step: int | None
    name: str
    operation: str
    bytes: int | None
    group: tuple[int, ...] | None
    start: int
    end: int


def collectives(timeline: Timeline) -> list[TracedCollective]:
    """Return the collectives of a rank by start: kernels of its devices, and annotations of gloo."""
    trace, events, device, tree = timeline.trace, timeline.events, timeline.device, timeline.tree
    groups = _configured(trace)
    everyone = next(iter(groups.values())) if len(set(groups.values())) == 1 else None
    by_code = [_ranks(word, groups) for word in events.words["group"]]
    names = [groups.get(_text(word)) for word in events.words["group_name"]]

    def group(row: int, launch: int) -> tuple[int, ...] | None:
        for at in (row, *(tree.rows[outer] for outer in tree.upwards(launch))):
            for column, ranks in (("group", by_code), ("group_name", names)):
                code = int(events[column][at])
                if code >= 0 and ranks[code] is not None:
                    return ranks[code]
        return everyone

    lacking = {name for name in ("elements", "dtype", "collective") if not (events[name] >= 0).any()}

    def recorded(column: str, row: int, launch: int) -> int:
        if column in lacking:
            return MISSING
        values = events[column]
        around = (int(values[tree.rows[outer]]) for outer in tree.upwards(launch))
        return next((value for value in (int(values[row]), *around) if value >= 0), MISSING)

    def size(row: int, launch: int) -> int | None:
        elements, code = recorded("elements", row, launch), recorded("dtype", row, launch)
        item = ITEM_BYTES.get(_text(events.words["dtype"][code]).lower()) if code >= 0 else None
        return elements * item if elements > 0 and item else None

    def operation(row: int, launch: int) -> str:
        code = recorded("collective", row, launch)
        return events.words["collective"][code] if code >= 0 else ""

    chosen = np.flatnonzero(device.of_kind(Kind.COMMUNICATION))
    is_gloo = events.where("name", lambda word: word.startswith(GLOO)) & events.among(HOST)
    on_host = np.flatnonzero(is_gloo[tree.rows])
    rows = np.concatenate((device.rows[chosen], tree.rows[on_host]))
    launches = np.concatenate((device.launch[chosen], on_host))
    starts = events["start"][rows]
    steps: Integers = timeline.step_of(starts)
    calls = [
        TracedCollective(
            timeline.steps[index].number if index >= 0 else None,
            timeline.name(row),
            operation(row, launch),
            size(row, launch),
            group(row, launch),
            start,
            start + length,
        )
        for row, launch, index, start, length in zip(
            rows.tolist(), launches.tolist(), steps.tolist(), starts.tolist(),
            events["duration"][rows].tolist(), strict=True,
        )
    ]  # fmt: skip
    return sorted(calls, key=lambda collective: collective.start)


def _configured(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group that the file lists, by name."""
    about = trace.metadata.get("distributedInfo")
    listed = about.get("pg_config") if isinstance(about, dict) else None
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    groups = {str(row.get("pg_name")): _whole(row.get("ranks")) for row in rows}
    return {name: ranks for name, ranks in groups.items() if ranks}


def _whole(ranks: object) -> tuple[int, ...]:
    is_list = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    return tuple(ranks) if is_list and isinstance(ranks, list) else ()


@cache
def _text(word: str) -> str:
    try:
        return str(json.loads(word))
    except ValueError:
        return word


def _ranks(word: str, groups: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the ranks in the text ``[0, 1]``; of a long list that is cut off, the group that begins so."""
    text = _text(word).strip("[] ")
    cut = text.partition("...")[0].strip(", ")
    if not cut or not all(part.strip().isdigit() for part in cut.split(",")):
        return None
    ranks = tuple(int(part) for part in cut.split(","))
    if cut == text:
        return ranks
    alike = {group for group in groups.values() if group[: len(ranks)] == ranks}
    return alike.pop() if len(alike) == 1 else None
