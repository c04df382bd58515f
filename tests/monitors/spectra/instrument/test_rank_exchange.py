"""Every parameter has one owner, work is balanced, and all ranks agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.spectra.instrument.replicate_buffer import Target
from backlight.monitors.spectra.instrument.worker_thread import (
    Offer,
    agreed_owners,
    common_parameters,
    cost,
    longest_first,
    owners,
)
from backlight.store.spectra import Layer

SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30)


def test_longest_is_assigned_to_least_loaded():
    assert longest_first([5, 9, 3, 3, 4], 2) == (1, 0, 0, 1, 1)
    assert longest_first([1, 1], 5) == (0, 1)
    assert cost(4, 10) == cost(10, 4) == 160


@pytest.mark.slow
@settings(deadline=None)
@given(SHAPES, st.integers(1, 40))
def test_busiest_rank_is_within_four_thirds_of_any_schedule(shapes, ranks):
    costs = [cost(*shape) for shape in shapes]
    owners = longest_first(costs, ranks)
    load = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
    # No schedule does better than these, and Graham's bound holds against the best one.
    ordered = sorted(costs, reverse=True)
    pair = ordered[ranks - 1] + ordered[ranks] if len(costs) > ranks else 0
    best_known = max(sum(costs) / ranks, ordered[0], pair)
    # The optimum exceeds the lower bound by at most the last item.
    slack = best_known / 3 if len(costs) > ranks else 0
    assert max(load) <= best_known * (4 / 3 - 1 / (3 * ranks)) + slack
    if len(costs) <= ranks:
        assert sorted(load, reverse=True)[: len(costs)] == ordered


def test_all_ranks_drop_what_one_lacks_or_has_in_another_type() -> None:
    kind = ("torch.float32", (2, 4))
    one = Offer(0, {"a": 2, "b": 2, "c": 2}, dict.fromkeys("abc", kind), owners={"a": 0, "b": 1, "c": 0})
    other = Offer(
        0, {"a": 2, "c": 1}, {"a": kind, "c": ("torch.bfloat16", (2, 4))}, owners={"a": 1, "c": 1, "d": 1}
    )
    assert agreed_owners([one, other]) == {"a": 0, "b": 1, "c": 0, "d": 1}
    together, dropped = common_parameters([one, other], agreed_owners([one, other]))
    assert together == ("a",)
    assert dropped == {
        "b": "no whole set of gradients on rank 1",
        "c": "its gradients have another type or shape on some ranks",
        "d": "no whole set of gradients on rank 0, 1",
    }


def test_layers_are_assigned_by_cost() -> None:
    def target(key: int, rows: int) -> Target:
        return Target(key, f"w{key}", (Layer(f"w{key}", "", (rows, 4), "", rows, 4, key),), 16 * rows)

    assert owners([target(0, 2), target(1, 50), target(2, 8)], 2) == {"w1": 0, "w2": 1, "w0": 1}
