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

from backlight.monitors.stalls.model.exit_reason import ExitReason
from backlight.monitors.stalls.model.observation import Diagnosis, Observation
from backlight.monitors.stalls.model.shared_state import Collective, State, StateSnapshot
from backlight.records import DiagnosisKind, Phase, to_json

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
_TIMES = ("taken", "heartbeat", "phase_since", "node_since", "sampler")


def pack(
    observations: Sequence[Observation],
    diagnoses: Mapping[int, Diagnosis | None],
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
                "rank": observation.rank,
                "board": _board(observation.board, shift),
                "history": [
                    _board(b, shift, bare=True)
                    for b in observation.history[:: max(len(observation.history) // READINGS, 1)][-READINGS:]
                ],
                "ended": observation.ended,
                "ended_at": observation.ended_at + shift / 1e9 if observation.ended else 0.0,
                "stopped": observation.stopped,
                "told": observation.terminated,
                "ending": None
                if observation.exit_reason is None
                else {
                    **dataclasses.asdict(observation.exit_reason),
                    "at": observation.exit_reason.at + shift / 1e9,
                },
                "judgement": None
                if diagnoses.get(observation.rank) is None
                else to_json(diagnoses[observation.rank]),
            }
            for observation in observations
        ],
    }


@dataclasses.dataclass(frozen=True)
class Observed:
    """The observations of one machine, as they were stored."""

    observations: tuple[Observation, ...]
    diagnoses: dict[int, Diagnosis | None]
    groups: dict[int, list[int]]
    world: int


def unpack(data: Mapping[str, Any]) -> Observed | None:
    """Read what :func:`pack` gave; None for what is not understood."""
    try:
        observations, diagnoses = [], {}
        for one in data["ranks"]:
            rank = int(one["rank"])
            board = _read_board(one["board"])
            observations.append(
                Observation(
                    rank=rank,
                    snapshots=(board,) if board is not None else (),
                    history=tuple(b for h in one["history"] if (b := _read_board(h)) is not None),
                    ended=str(one["ended"]),
                    ended_at=float(one["ended_at"]),
                    stopped=bool(one["stopped"]),
                    terminated=bool(one["told"]),
                    exit_reason=None if one["ending"] is None else ExitReason(**one["ending"]),
                )
            )
            diagnoses[rank] = _read_judgement(one["judgement"])
        groups = {int(key): [int(r) for r in ranks] for key, ranks in data["groups"].items()}
        return Observed(tuple(observations), diagnoses, groups, int(data["world"]))
    except (KeyError, TypeError, ValueError):
        return None


def ended(observed: Observed) -> Observed:
    """Return of old observations what stays true: the ranks that had ended."""
    observations = tuple(
        v for v in observed.observations if v.ended or (v.board is not None and v.board.state in _CLOSED)
    )
    return dataclasses.replace(observed, observations=observations)


def together(observed: Iterable[Observed]) -> Observed | None:
    """Return the observations of several machines as one; the first that holds a rank counts for it."""
    observations: dict[int, Observation] = {}
    diagnoses: dict[int, Diagnosis | None] = {}
    groups: dict[int, list[int]] = {}
    world = 1
    for one in observed:
        for observation in one.observations:
            if observation.rank not in observations:
                observations[observation.rank] = observation
                diagnoses[observation.rank] = one.diagnoses.get(observation.rank)
        groups.update(one.groups)
        world = max(world, one.world)
    if not observations:
        return None
    return Observed(
        tuple(observation for _, observation in sorted(observations.items())), diagnoses, groups, world
    )


def _board(state: StateSnapshot | None, shift: int, *, bare: bool = False) -> dict[str, Any] | None:
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


def _read_board(data: Any) -> StateSnapshot | None:
    if data is None:
        return None
    known = {f.name for f in dataclasses.fields(StateSnapshot)}
    fields = {name: value for name, value in data.items() if name in known}
    calls = {f.name for f in dataclasses.fields(Collective)}
    fields["collectives"] = tuple(
        Collective(**{k: v for k, v in call.items() if k in calls}) for call in data["collectives"]
    )
    fields["typical"] = {Phase(phase): float(seconds) for phase, seconds in data["typical"].items()}
    fields["state"], fields["phase"] = State(data["state"]), Phase(data["phase"])
    return StateSnapshot(**fields)


def _read_judgement(data: Any) -> Diagnosis | None:
    if data is None:
        return None
    known = {f.name for f in dataclasses.fields(Diagnosis)}
    fields = {name: value for name, value in data.items() if name in known}
    return Diagnosis(**{**fields, "kind": DiagnosisKind(data["kind"]), "phase": Phase(data["phase"])})
