"""Every layer has one owner and one sweep, work is balanced, and what is held stays in the budget."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.monitors.spectra.model.ownership import cost, longest_first, sweeps

SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30)


def test_the_longest_is_assigned_to_the_least_loaded():
    assert longest_first([5, 9, 3, 3, 4], 2) == (1, 0, 0, 1, 1)
    assert longest_first([1, 1], 5) == (0, 1)
    assert cost(4, 10) == cost(10, 4) == 160


@settings(deadline=None)
@given(SHAPES, st.integers(1, 40))
def test_the_busiest_rank_is_within_four_thirds_of_any_schedule(shapes, ranks):
    costs = [cost(*shape) for shape in shapes]
    owners = longest_first(costs, ranks)
    load = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
    # No schedule does better than these, and Graham's bound holds against the best one.
    ordered = sorted(costs, reverse=True)
    pair = ordered[ranks - 1] + ordered[ranks] if len(costs) > ranks else 0
    best_known = max(sum(costs) / ranks, ordered[0], pair)
    assert max(load) <= best_known * (4 / 3 - 1 / (3 * ranks)) + max(0, _gap(costs, ranks, best_known))
    if len(costs) <= ranks:
        assert sorted(load, reverse=True)[: len(costs)] == ordered


def _gap(costs, ranks, lower):
    # The true optimum may lie above the lower bound by at most the last item.
    return lower / 3 if len(costs) > ranks else 0


@settings(deadline=None)
@given(SHAPES, st.integers(3, 20), st.integers(1, 8), st.integers(1, 10**6))
def test_sweeps_fit_the_budget_and_leave_nothing_out(shapes, replicates, ranks, budget):
    costs = [cost(*shape) for shape in shapes]
    sizes = [4 * p * q for p, q in shapes]
    planned = sweeps(costs, sizes, replicates=replicates, ranks=ranks, budget=budget)
    assert sorted(i for sweep in planned for i in sweep.layers) == list(range(len(shapes)))
    share = math.ceil(replicates / ranks)
    for sweep in planned:
        owned = [0] * ranks
        for index, owner in zip(sweep.layers, sweep.owners, strict=True):
            owned[owner] += replicates * sizes[index]
        held = share * sum(sizes[i] for i in sweep.layers)
        largest = replicates * max(sizes[i] for i in sweep.layers)
        if len(sweep.layers) == 1:
            assert max(owned) == largest
        else:
            assert (max(owned) if ranks == 1 else held + max(owned)) <= budget


def test_layers_that_fit_are_one_balanced_sweep():
    (sweep,) = sweeps([8] * 6, [100] * 6, replicates=4, ranks=3, budget=10**6)
    assert sorted(sweep.owners) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_layer_that_does_not_fit_has_its_own_sweep(ranks):
    planned = sweeps([9, 1, 1], [1000, 10, 10], replicates=8, ranks=ranks, budget=400)
    assert [sweep.layers for sweep in planned] == [(0,), (1, 2)]
