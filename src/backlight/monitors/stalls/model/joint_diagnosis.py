"""What the sidecars of several machines saw, joined into one diagnosis. No torch.

A sidecar sees the ranks of its machine. When it has a verdict that other machines may explain, it stores what
it observed of each rank and asks, by a small file in the run directory; the other sidecars answer with what
they
observe at that moment. Whoever reads the run takes the observations together and attributes as one sidecar
that sees all ranks would. Clocks are those of the machines: what happened first on two of them is known as
well as they agree.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backlight.monitors.stalls.model.exit_reason import Ending
from backlight.monitors.stalls.model.observation import Judgement, View
from backlight.monitors.stalls.model.shared_state import BoardState, Collective, State
from backlight.records import Phase, Verdict, to_json

KIND = "stall_views"
"""Event that holds the observations of one machine."""

VERDICT, ANSWER, LEAVES = "verdict", "answer", "leaves"
"""Why a machine tells what it observes: a verdict of its own, a question, or that its last rank has ended."""

WINDOW = 60.0
"""Seconds between the observations of two machines that still belong to one stall."""

READINGS = 24
"""Readings of a board that are kept as its history."""

UNSEEN = "not seen from this machine"
"""Words by which a verdict says that other machines may explain it."""

_CLOSED = {State.FINISHED, State.FAILED}
_TIMES = ("taken", "beat", "phase_since", "node_since", "witness")


def pack(
    views: Sequence[View],
    judged: Mapping[int, Judgement | None],
    groups: Mapping[int, Sequence[int]],
    world: int,
) -> dict[str, Any]:
    """Return the observations of one machine as JSON types, with times of the common calendar."""
    shift = time.time_ns() - time.monotonic_ns()
    return {
        "world": world,
        "groups": {str(key): list(ranks) for key, ranks in groups.items()},
        "ranks": [
            {
                "rank": view.rank,
                "board": _board(view.board, shift),
                "history": [
                    _board(b, shift, bare=True)
                    for b in view.history[:: max(len(view.history) // READINGS, 1)][-READINGS:]
                ],
                "ended": view.ended,
                "ended_at": view.ended_at + shift / 1e9 if view.ended else 0.0,
                "stopped": view.stopped,
                "told": view.told,
                "ending": None
                if view.ending is None
                else {**dataclasses.asdict(view.ending), "at": view.ending.at + shift / 1e9},
                "judgement": None if judged.get(view.rank) is None else to_json(judged[view.rank]),
            }
            for view in views
        ],
    }


@dataclasses.dataclass(frozen=True)
class Observed:
    """The observations of one machine, as they were stored."""

    views: tuple[View, ...]
    judged: dict[int, Judgement | None]
    groups: dict[int, list[int]]
    world: int


def unpack(data: Mapping[str, Any]) -> Observed | None:
    """Read what :func:`pack` gave; None for what is not understood."""
    try:
        views, judged = [], {}
        for one in data["ranks"]:
            rank = int(one["rank"])
            board = _read_board(one["board"])
            views.append(
                View(
                    rank=rank,
                    boards=(board,) if board is not None else (),
                    history=tuple(b for h in one["history"] if (b := _read_board(h)) is not None),
                    ended=str(one["ended"]),
                    ended_at=float(one["ended_at"]),
                    stopped=bool(one["stopped"]),
                    told=bool(one["told"]),
                    ending=None if one["ending"] is None else Ending(**one["ending"]),
                )
            )
            judged[rank] = _read_judgement(one["judgement"])
        groups = {int(key): [int(r) for r in ranks] for key, ranks in data["groups"].items()}
        return Observed(tuple(views), judged, groups, int(data["world"]))
    except (KeyError, TypeError, ValueError):
        return None


def ended(observed: Observed) -> Observed:
    """Return of old observations what stays true: the ranks that had ended."""
    views = tuple(v for v in observed.views if v.ended or (v.board is not None and v.board.state in _CLOSED))
    return dataclasses.replace(observed, views=views)


def together(observed: Iterable[Observed]) -> Observed | None:
    """Return the observations of several machines as one; the first that holds a rank counts for it."""
    views: dict[int, View] = {}
    judged: dict[int, Judgement | None] = {}
    groups: dict[int, list[int]] = {}
    world = 1
    for one in observed:
        for view in one.views:
            if view.rank not in views:
                views[view.rank] = view
                judged[view.rank] = one.judged.get(view.rank)
        groups.update(one.groups)
        world = max(world, one.world)
    if not views:
        return None
    return Observed(tuple(view for _, view in sorted(views.items())), judged, groups, world)


def _board(state: BoardState | None, shift: int, *, bare: bool = False) -> dict[str, Any] | None:
    if state is None:
        return None
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    del fields["arrived"]
    fields |= {name: fields[name] + shift for name in _TIMES if fields[name]}
    fields["typical"] = {phase.value: seconds for phase, seconds in state.typical.items()}
    fields["collectives"] = [
        {
            **dataclasses.asdict(call),
            "entered": call.entered + shift,
            "left": call.left + shift if call.left else 0,
        }
        for call in (() if bare else state.collectives)
    ]
    fields["state"], fields["phase"] = int(state.state), state.phase.value
    return fields


def _read_board(data: Any) -> BoardState | None:
    if data is None:
        return None
    known = {f.name for f in dataclasses.fields(BoardState)}
    fields = {name: value for name, value in data.items() if name in known}
    calls = {f.name for f in dataclasses.fields(Collective)}
    fields["collectives"] = tuple(
        Collective(**{k: v for k, v in call.items() if k in calls}) for call in data["collectives"]
    )
    fields["typical"] = {Phase(phase): float(seconds) for phase, seconds in data["typical"].items()}
    fields["state"], fields["phase"] = State(data["state"]), Phase(data["phase"])
    return BoardState(**fields)


def _read_judgement(data: Any) -> Judgement | None:
    if data is None:
        return None
    known = {f.name for f in dataclasses.fields(Judgement)}
    fields = {name: value for name, value in data.items() if name in known}
    return Judgement(**{**fields, "verdict": Verdict(data["verdict"]), "phase": Phase(data["phase"])})
