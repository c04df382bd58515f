"""The storage log against a plain replay of its allocations and frees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.diagnose.memory.result import Account, MemoryKind, Storage, StorageLog

MODULES = ("", "a", "a.b", "c")


@st.composite
def storage_logs(draw: st.DrawFn) -> StorageLog:
    log, live = StorageLog(), list[int]()
    log.phases.append((0, "forward"))
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            log.free(live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            kind, module = draw(st.sampled_from(list(MemoryKind))), draw(st.sampled_from(MODULES))
            size = draw(st.integers(1, 5000))
            live.append(log.allocate(Storage(size, kind, module, "forward", "made", (size,), "uint8")))
        if draw(st.integers(0, 9)) == 0:
            log.phases.append((len(log.events), draw(st.sampled_from(["backward", "optimizer"]))))
    return log


def replay(log: StorageLog, granule: int) -> list[dict[int, int]]:
    states, live = [], dict[int, int]()
    for event in log.events:
        index = abs(event) - 1
        if event > 0:
            live[index] = -(-log.storages[index].nbytes // granule) * granule
        else:
            del live[index]
        states.append(dict(live))
    return states


@settings(deadline=None)
@given(storage_logs(), st.sampled_from([1, 512]))
def test_account_equals_a_replay_of_the_events(log: StorageLog, granule: int) -> None:
    states = replay(log, granule)
    totals = [sum(state.values()) for state in states]
    account = Account(log, 0, granule)
    assert account.curve.tolist() == totals
    assert account.peak == max(totals)
    assert account.position == totals.index(account.peak)
    assert account.live == sorted(states[account.position])
    assert account.curve_by_kind()[1].sum(axis=0).tolist() == totals


@settings(deadline=None)
@given(storage_logs(), st.integers(0, 59), st.sampled_from([1, 512]))
def test_account_adds_up(log: StorageLog, start: int, granule: int) -> None:
    account = Account(log, start % len(log.events), granule)
    assert account.peak == max(account.curve)
    assert sum(account.kinds().values()) == account.peak
    modules = account.modules()
    assert sum(module.exclusive for module in modules) == account.peak
    for module in modules:
        inside = [m for m in modules if not module.name or f"{m.name}.".startswith(f"{module.name}.")]
        assert module.inclusive == sum(m.exclusive for m in inside)
    assert max(account.phase_peaks().values()) == account.peak
    assert sum(tensor.bytes for tensor in account.largest(1000)) == account.peak
    positions, rows = account.curve_by_kind(points=7)
    assert rows.sum(axis=0).max() == account.peak
    assert account.curve[positions].tolist() == rows.sum(axis=0).tolist()


def test_empty_log_has_no_peak() -> None:
    with pytest.raises(ValueError, match="no memory was recorded from event 0 on"):
        _ = Account(StorageLog()).peak
