"""Observations of ranks, written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from backlight.records import Phase
from backlight.watchdog.observation import Observation
from backlight.watchdog.shared_state import RankStatus, StateSnapshot
from backlight.watchdog.stacks import Frame, StackSample, ThreadStack
from backlight.watchdog.timeouts import StallLimits

LIMITS = StallLimits()
S = 10**9
MAIN = 7
ENGINE = Frame("/lib/torch/autograd/graph.py", 979, "_engine_run_backward")
USER = Frame("/home/me/ops.py", 22, "LockedFn.backward")
TOP = Frame("/home/me/train.py", 5, "main")


def snapshot(**changes: Any) -> StateSnapshot:
    """A rank in its third backward, silent for 40 s with a timeout of 30 s."""
    base = StateSnapshot(
        taken=1000 * S, pid=4242, rank=0, world_size=1, status=RankStatus.RUNNING,
        main_ident=MAIN, main_tid=4242, heartbeat=960 * S, progress=50, phase=Phase.BACKWARD,
        phase_since=959 * S, step=2, backwards=2, nodes_total=100, nodes_done=40,
        position_hooks=0, row=1, reached=2, expected=4,
        node="LockedFnBackward", node_since=960 * S, node_calls=3, backward_ident=MAIN,
        inside=False, sampler=1000 * S, device=False, distributed=False, timeout_s=None,
        forwards=3, typical=dict.fromkeys(Phase, 0.1),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def samples(
    *frames: Frame, runs_bytecode: bool | None = None, source: str = "sampler", count: int = 4
) -> tuple[StackSample, ...]:
    stack = ThreadStack(MAIN, frames, "MainThread", 4242, runs_bytecode)
    return tuple(StackSample((990 + i) * S, source, (stack,)) for i in range(count))


def native(*, holds_gil: bool) -> tuple[StackSample, ...]:
    stack = ThreadStack(
        MAIN, (USER, ENGINE, TOP), native=(Frame("libmkl.so", 0, "sgemm"),), holds_gil=holds_gil
    )
    return tuple(StackSample((995 + i) * S, "py-spy", (stack,)) for i in range(2))


def observation(state: StateSnapshot | None = None, **changes: Any) -> Observation:
    base = Observation(
        rank=0, snapshots=(state or snapshot(),), samples=samples(USER, ENGINE, TOP), cpu=0.0, thread_cpu=0.0,
        names=("0.weight", "0.bias", "1.weight", "1.bias"),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)
