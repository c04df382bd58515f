"""Each layer is in one sweep, and the held gradients fit the budget."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.diagnose.spectra.checkpoint_measurement import sweeps
from backlight.monitors.spectra.instrument.worker_thread import cost

SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30)


@settings(deadline=None)
@given(SHAPES, st.integers(3, 20), st.integers(1, 8), st.integers(1, 10**6))
def test_sweeps_fit_the_budget_and_contain_every_layer(shapes, replicates, ranks, budget):
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
def test_layer_that_does_not_fit_has_its_own_sweep(ranks):
    planned = sweeps([9, 1, 1], [1000, 10, 10], replicates=8, ranks=ranks, budget=400)
    assert [sweep.layers for sweep in planned] == [(0,), (1, 2)]
