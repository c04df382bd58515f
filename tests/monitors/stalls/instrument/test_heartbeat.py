"""Counted steps write no times: what the stack sampler reads of them is progress, phase by phase."""

from __future__ import annotations

from pathlib import Path

from backlight.capture.parameters import Scope
from backlight.capture.unrecorded import BACKWARDS, BOARD_LENGTH, NUMBERS, PHASE, PROGRESS
from backlight.monitors.stalls.instrument.heartbeat import Heartbeat
from backlight.records import Phase
from backlight.watchdog.shared_state import SharedState, Slot


def test_every_phase_of_a_counted_step_has_its_whole_timeout(tmp_path: Path) -> None:
    shared = SharedState(tmp_path / "rank-00000.state")
    shared.open(rank=0, world_size=1, main_ident=1, main_tid=2, timeout_s=1.5)
    heartbeat = Heartbeat(shared, Scope(), lambda _names: None)
    slots = shared.slots
    board = slots[Slot.HEARTBEAT : Slot.HEARTBEAT + BOARD_LENGTH]
    heartbeat.unrecorded_begin()

    def observed_at(now: int) -> tuple[int, int]:
        heartbeat.observe_progress(now)
        assert slots[Slot.HEARTBEAT] == slots[Slot.PHASE_SINCE]
        return slots[Slot.HEARTBEAT], slots[Slot.PROGRESS]

    board[PROGRESS] += 1
    board[PHASE] = NUMBERS[Phase.FORWARD]
    begun = board[PROGRESS]
    assert observed_at(1000) == (1000, begun)
    assert observed_at(2000) == (1000, begun)  # it hangs
    for now, phase in ((3000, Phase.LOSS), (5000, Phase.BACKWARD), (7000, Phase.OTHER)):
        board[PHASE] = NUMBERS[phase]
        begun += 1
        assert observed_at(now) == (now, begun)
        assert observed_at(now + 1000) == (now, begun)
    board[BACKWARDS] += 1  # a short one, between two looks
    assert observed_at(9000) == (9000, begun + 1)
