"""The talk between the sidecars of several machines, by files in the run directory. No torch.

Nothing of it is waited for: whoever is asked answers when it looks next, into its own file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from backlight.monitors.stalls.model.joint_diagnosis import KIND, WINDOW, pack
from backlight.monitors.stalls.model.observation import Diagnosis, Observation
from backlight.monitors.stalls.model.rank_observer import RankObserver
from backlight.store.write.watchdog import WatchdogWriter

BETWEEN = 1.0
"""Seconds between two looks for a question."""

HostObservation = tuple[list[Observation], dict[int, Diagnosis | None], dict[int, list[int]], int]
"""What one machine sees: its ranks, the verdict on each alone, groups, and ranks in all."""


def world_of(ranks: Iterable[RankObserver]) -> int:
    """Return how many ranks the training has, as those of this machine say."""
    return max((r.board.world for r in ranks if r.board is not None), default=1)


class Peers:
    """The other machines, as the sidecar of this one knows them."""

    def __init__(self, writer: WatchdogWriter) -> None:
        self._writer = writer
        self._answered = 0.0
        self._next = 0.0

    def concerned(self, world: int, here: int) -> bool:
        """Tell whether ranks of the training are on other machines."""
        return world > here > 0

    def tell(
        self,
        why: str,
        observations: list[Observation],
        diagnoses: dict[int, Diagnosis | None],
        groups: dict[int, list[int]],
        world: int,
    ) -> None:
        """Store what is observed here, and why it is told."""
        step = max((v.board.step for v in observations if v.board is not None), default=None)
        said = {"host": self._writer.host, "why": why, **pack(observations, diagnoses, groups, world)}
        self._writer.event(step, KIND, said)

    def ask(self, allowed: float) -> None:
        """Ask the others what they see; ``allowed`` is the patience that is over here, in seconds."""
        self._answered = time.time()
        self._writer.ask({"at": self._answered, "allowed": allowed})

    def question(self) -> dict[str, Any] | None:
        """Return a question of another machine that is not answered yet."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + BETWEEN
        asked = self._writer.asked()
        if asked is None or asked.get("host") == self._writer.host:
            return None
        at = asked.get("at")
        if not isinstance(at, (int, float)) or at <= self._answered or time.time() - at > WINDOW:
            return None
        self._answered = float(at)
        return asked
