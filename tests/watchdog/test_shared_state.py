"""Shared state of a rank: round trip, ring of collectives, full memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backlight.records import Phase
from backlight.watchdog.shared_state import (
    MAX_COLLECTIVES,
    PHASES,
    RankStatus,
    SharedState,
    Slot,
    read_state,
)


@pytest.fixture
def shared(tmp_path: Path) -> SharedState:
    made = SharedState(tmp_path / "rank-00003.state")
    made.open(rank=3, world_size=4, main_ident=1, main_tid=2, timeout_s=1.5)
    return made


def test_written_state_is_read(shared: SharedState) -> None:
    shared.write_node("Größe".encode())
    shared.slots[Slot.PHASE] = PHASES.index(Phase.BACKWARD)
    shared.slots[Slot.ROW] = 5
    state = read_state(shared.path)
    assert (state.pid, state.rank, state.world_size, state.timeout_s) == (os.getpid(), 3, 4, 1.5)
    assert (state.phase, state.node, state.row) == (Phase.BACKWARD, "Größe", 4)
    assert state.status is RankStatus.RUNNING
    shared.close(RankStatus.FAILED)
    assert read_state(shared.path).status is RankStatus.FAILED


def test_incomplete_state_is_not_read(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none") is None
    made = SharedState(tmp_path / "rank-00000.state")
    assert read_state(made.path) is None
    with pytest.raises(FileExistsError):
        SharedState(made.path)


def test_collectives_are_kept_in_a_ring(shared: SharedState) -> None:
    for number in range(MAX_COLLECTIVES + 5):
        index = shared.enter_collective(7, number, 1, 2, f"all_reduce({number})".encode(), blocking=True)
        if number < MAX_COLLECTIVES + 4:
            shared.leave_collective(index, blocking=True)
    state = read_state(shared.path)
    assert [c.number for c in state.collectives] == list(range(5, MAX_COLLECTIVES + 5))
    assert state.inside
    last = MAX_COLLECTIVES + 4
    assert (state.current_call.number, state.current_call.call) == (last, f"all_reduce({last})")


def test_full_memory_raises_when_the_page_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SharedState(tmp_path / "rank-00000.state")
    assert not list(tmp_path.iterdir())
