"""The algebra of the ledger, against a plain replay of what came and went."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.diagnose.memory.account import Account
from backlight.diagnose.memory.storage_log import Kind, Ledger, Storage

MODULES = ("", "a", "a.b", "c")


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger, live = Ledger(), list[int]()
    ledger.phases.append((0, "forward"))
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            ledger.went(live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            kind, module = draw(st.sampled_from(list(Kind))), draw(st.sampled_from(MODULES))
            size = draw(st.integers(1, 5000))
            live.append(ledger.came(Storage(size, kind, module, "forward", "made", (size,), "uint8")))
        if draw(st.integers(0, 9)) == 0:
            ledger.phases.append((len(ledger.events), draw(st.sampled_from(["backward", "optimizer"]))))
    return ledger


def replay(ledger: Ledger, granule: int) -> list[dict[int, int]]:
    states, live = [], dict[int, int]()
    for event in ledger.events:
        index = abs(event) - 1
        if event > 0:
            live[index] = -(-ledger.storages[index].nbytes // granule) * granule
        else:
            del live[index]
        states.append(dict(live))
    return states


@settings(deadline=None)
@given(ledgers(), st.sampled_from([1, 512]))
def test_the_ledger_is_a_replay_of_its_events(ledger: Ledger, granule: int) -> None:
    states = replay(ledger, granule)
    totals = [sum(state.values()) for state in states]
    assert ledger.curve(granule).tolist() == totals
    position, peak = ledger.peak(granule)
    assert peak == max(totals)
    assert position == totals.index(peak)
    for at in {0, position, len(states) - 1}:
        assert ledger.live(at) == sorted(states[at])
        assert sum(ledger.by_kind(at, granule).values()) == totals[at]
        modules = ledger.by_module(at, granule)
        assert sum(sum(kinds.values()) for kinds in modules.values()) == totals[at]
    assert ledger.curves(granule).sum(axis=0).tolist() == totals


@settings(deadline=None)
@given(ledgers(), st.integers(0, 59))
def test_an_account_adds_up(ledger: Ledger, start: int) -> None:
    start %= len(ledger.events)
    account = Account(ledger, start, 512)
    assert account.peak == max(account.curve)
    assert sum(account.kinds().values()) == account.peak
    modules = account.modules()
    assert sum(module.exclusive for module in modules) == account.peak
    for module in modules:
        inside = [m for m in modules if m.name == module.name or m.name.startswith(f"{module.name}.")]
        inside = modules if not module.name else inside
        assert module.inclusive == sum(m.exclusive for m in inside)
    assert max(account.phase_peaks().values()) == account.peak
    assert sum(tensor.nbytes for tensor in account.largest(1000)) == account.peak
    positions, rows = account.curve_by_kind(points=7)
    assert rows.sum(axis=0).max() == account.peak
    assert account.curve[positions].tolist() == rows.sum(axis=0).tolist()


def test_an_empty_ledger_has_no_peak() -> None:
    with pytest.raises(ValueError, match="no memory was recorded from event 0 on"):
        Ledger().peak()
